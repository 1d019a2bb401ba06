"""From attention to one importance per prompt token (SpecPrefill, sections 3.2.1-3.2.3). Pure tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

# Queries, keys, scaling and, where the layer has them, sinks: the arguments of `attention_to_prompt`.
ScoredLayer = tuple[torch.Tensor, torch.Tensor, float] | tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None]


def attention_to_prompt(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax over the prompt keys alone, and the head's sink where there is one, in fp32.

    queries (num_heads, n, head_dim); keys (num_kv_heads, num_prompt_tokens, head_dim); sinks (num_heads,). Heads
    that share a key head are folded into the queries, so the keys are never repeated. Returns
    (num_heads, n, num_prompt_tokens); with a sink the rows sum to less than one.
    """
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_prompt_tokens, _ = keys.shape
    folded = queries.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, head_dim)
    scores = torch.matmul(folded.float() * scaling, keys.float().transpose(-1, -2))
    scores = scores.reshape(num_heads, num_queries, num_prompt_tokens)
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def pool(attention: torch.Tensor, kernel: int) -> torch.Tensor:
    """Average every row over a centred window of `kernel` tokens; at the ends over the tokens that exist."""
    if kernel == 1:
        return attention
    return F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2, count_include_pad=False)


def token_importance(
    layers: Iterable[ScoredLayer],
    pool_kernel: int,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda best: best,
) -> torch.Tensor:
    """Importance (num_prompt_tokens,): pooled attention, max over layers and heads, mean over queries.

    layers yields (queries, keys, scaling[, sinks]) as `attention_to_prompt` takes them, all with the same n. Layers are
    folded in one at a time: the peak is one layer's (num_heads, n, num_prompt_tokens). over_ranks takes the maximum
    (n, num_prompt_tokens) over the ranks that share the heads, if any do. Raises ValueError for no layers or a
    non-finite result.
    """
    best: torch.Tensor | None = None
    for layer in layers:
        weights = pool(attention_to_prompt(*layer), pool_kernel).amax(dim=0)
        best = weights if best is None else torch.maximum(best, weights)
    if best is None:
        raise ValueError("no attention layer that sees the whole prompt was captured; the draft cannot score it")
    importance = over_ranks(best).mean(dim=0)
    if not bool(torch.isfinite(importance).all()):
        raise ValueError("the draft's attention is not finite")
    return importance
