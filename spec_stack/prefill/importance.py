"""From attention to one importance per prompt token (SpecPrefill, sections 3.2.1-3.2.3). Pure tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F


def attention_to_prompt(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Softmax over the prompt keys alone, in fp32.

    queries (num_heads, n, head_dim); keys (num_kv_heads, num_prompt_tokens, head_dim). Heads that share a key
    head are folded into the queries, so the keys are never repeated. Returns (num_heads, n, num_prompt_tokens).
    """
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_prompt_tokens, _ = keys.shape
    folded = queries.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, head_dim)
    scores = torch.matmul(folded.float() * scaling, keys.float().transpose(-1, -2))
    return scores.softmax(dim=-1).reshape(num_heads, num_queries, num_prompt_tokens)


def pool(attention: torch.Tensor, kernel: int) -> torch.Tensor:
    """Average every row over a centred window of `kernel` tokens; at the ends over the tokens that exist."""
    if kernel == 1:
        return attention
    return F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2, count_include_pad=False)


def token_importance(
    layers: Iterable[tuple[torch.Tensor, torch.Tensor, float]],
    pool_kernel: int,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda best: best,
) -> torch.Tensor:
    """Importance (num_prompt_tokens,): pooled attention, max over layers and heads, mean over queries.

    layers yields (queries, keys, scaling) as `attention_to_prompt` takes them, all with the same n. Layers are
    folded in one at a time: the peak is one layer's (num_heads, n, num_prompt_tokens). over_ranks takes the maximum
    (n, num_prompt_tokens) over the ranks that share the heads, if any do. Raises ValueError for no layers or a
    non-finite result.
    """
    best: torch.Tensor | None = None
    for queries, keys, scaling in layers:
        layer = pool(attention_to_prompt(queries, keys, scaling), pool_kernel).amax(dim=0)
        best = layer if best is None else torch.maximum(best, layer)
    if best is None:
        raise ValueError("no attention layer was captured; the draft cannot score a prompt")
    importance = over_ranks(best).mean(dim=0)
    if not bool(torch.isfinite(importance).all()):
        raise ValueError("the draft's attention is not finite")
    return importance
