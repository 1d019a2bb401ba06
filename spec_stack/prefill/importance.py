"""From attention to one importance per prompt token. Pure tensors.

How it is used: `token_importance(layers, pool_kernel)` is the paper's rule, `mean_share(layers, first, last)` that of
chosen heads; `attention.CapturedAttention` calls the one that a configuration asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

# Keys that are turned to fp32 at once.
_KEYS_PER_TILE = 1 << 14
_NO_LAYER = "no attention layer that sees the whole prompt was captured; the draft cannot score it"
# Queries, keys, scaling and, where the layer has them, sinks: the arguments of `attention_to_prompt`.
ScoredLayer = tuple[torch.Tensor, torch.Tensor, float] | tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None]


def attention_to_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
    num_asking: int = 1,
) -> torch.Tensor:
    """Softmax over the prompt keys alone, and the head's sink where there is one, in fp32.

    Heads that share a key head are folded into the queries, so the keys are never repeated.

    Parameters
    ----------
    queries
        (num_heads, n, head_dim).
    keys
        (num_kv_heads, num_prompt_tokens, head_dim).
    scaling
        Of the scores.
    sinks
        (num_heads,), for a model that has them.
    num_asking
        How many queries, the first ones, are those of the prompt's last tokens, each of which sees itself and what
        comes before it.

    Returns
    -------
    torch.Tensor
        (num_heads, n, num_prompt_tokens); with a sink the rows sum to less than one.
    """
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_prompt_tokens, _ = keys.shape
    folded = queries.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, head_dim).float() * scaling
    tiles = [torch.matmul(folded, tile.float().transpose(-1, -2)) for tile in torch.split(keys, _KEYS_PER_TILE, dim=1)]
    scores = torch.cat(tiles, dim=-1).reshape(num_heads, num_queries, num_prompt_tokens)
    if num_asking > 1:
        tail = scores[:, :num_asking, num_prompt_tokens - num_asking :]
        future = torch.ones(num_asking, num_asking, dtype=torch.bool, device=tail.device).triu(1)
        tail.masked_fill_(future, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def pool(attention: torch.Tensor, kernel: int) -> torch.Tensor:
    """Average every row over a centred window of `kernel` tokens; at the ends over the tokens that exist."""
    if kernel == 1:
        return attention
    return F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2, count_include_pad=False)


def choose_heads(layer: ScoredLayer, heads: Sequence[int] | None) -> ScoredLayer:
    """The layer with these query heads only, each with a key head of its own; None leaves it whole."""
    if heads is None:
        return layer
    queries, keys, scaling, *rest = layer
    index = torch.tensor(heads, device=queries.device)
    groups = queries.shape[0] // keys.shape[0]
    sinks = rest[0] if rest else None
    return queries[index], keys[index // groups], scaling, None if sinks is None else sinks[index]


def token_importance(
    layers: Iterable[ScoredLayer],
    pool_kernel: int,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda best: best,
    num_asking: int = 1,
) -> torch.Tensor:
    """Importance of every prompt token: pooled attention, max over layers and heads, mean over queries.

    Parameters
    ----------
    layers
        (queries, keys, scaling[, sinks]) as `attention_to_prompt` takes them, all with the same n.
    pool_kernel
        Width of the average, in tokens; odd.
    over_ranks
        Takes the maximum (n, num_prompt_tokens) over the ranks that share the heads, if any do.
    num_asking
        As in `attention_to_prompt`.

    Returns
    -------
    torch.Tensor
        (num_prompt_tokens,), fp32.

    Raises
    ------
    ValueError
        For no layers or a non-finite result.

    Notes
    -----
    SpecPrefill, https://arxiv.org/abs/2502.02789, sections 3.2.1-3.2.3. Key heads are folded in one at a time, so the
    peak is (heads per key head, n, num_prompt_tokens) of scores, and no more of fp32 keys than `_KEYS_PER_TILE`.
    """
    best: torch.Tensor | None = None
    for queries, keys, scaling, *rest in layers:
        sinks = rest[0] if rest else None
        groups = queries.shape[0] // keys.shape[0]
        for head in range(keys.shape[0]):
            own = slice(head * groups, (head + 1) * groups)
            attention = attention_to_prompt(
                queries[own], keys[head : head + 1], scaling, None if sinks is None else sinks[own], num_asking
            )
            weights = pool(attention, pool_kernel).amax(dim=0)
            best = weights if best is None else torch.maximum(best, weights.to(best.device))
    if best is None:
        raise ValueError(_NO_LAYER)
    return _finite(over_ranks(best).mean(dim=0))


def head_shares(layer: ScoredLayer, first: int, last: int, num_asking: int = 1) -> torch.Tensor:
    """Each head's attention over the middle of the prompt, as shares that sum to one.

    Parameters
    ----------
    layer
        As `attention_to_prompt` takes it.
    first, last
        Tokens at the ends that are kept anyway: they take no part, nor do the attention sinks among them.
    num_asking
        As in `attention_to_prompt`.

    Returns
    -------
    torch.Tensor
        (num_heads, num_prompt_tokens), fp32: the mean over the queries, 0 at the ends; all 0 for a head that looks
        nowhere else.
    """
    queries, keys, scaling, *rest = layer
    shares = attention_to_prompt(queries, keys, scaling, rest[0] if rest else None, num_asking).mean(dim=1)
    shares[:, :first] = 0
    shares[:, max(shares.shape[1] - last, 0) :] = 0
    return shares / shares.sum(dim=1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)


def mean_share(layers: Iterable[ScoredLayer], first: int, last: int, num_asking: int = 1) -> torch.Tensor:
    """Importance (num_prompt_tokens,) of every prompt token: the mean of the heads' shares (see `head_shares`).

    Raises
    ------
    ValueError
        For no layers or a non-finite result.
    """
    shares = [head_shares(layer, first, last, num_asking) for layer in layers]
    if not shares:
        raise ValueError(_NO_LAYER)
    # The layers of a model that is split stand on several devices.
    return _finite(torch.cat([share.to(shares[0].device) for share in shares]).mean(dim=0))


def _finite(importance: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(importance).all()):
        raise ValueError("the draft's attention is not finite")
    return importance
