"""The scoring draft's attention over its own pool, in bounded memory, and the importance by its heads. No SGLang.

On CUDA in half precision one flash kernel, which stores no scores; else tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_stack import devices
from spec_stack.config import PrefillConfig
from spec_stack.prefill.importance import ScoredLayer, Segment, head_importance, largest_attention, opening_attention

# Scores of one tile of queries over all heads: a quarter of a gigabyte in fp32, whatever the text's length.
MOST_SCORES = 1 << 26


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    most_scores: int = MOST_SCORES,
) -> torch.Tensor:
    """Attention of each query over the keys up to its own: (num_heads, n, head_dim).

    queries (num_heads, n, head_dim); keys, values (num_kv_heads, num_tokens, head_dim), the last n the queries' own.
    most_scores: bound on the stored scores, over all heads.
    """
    num_heads, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
    if devices.fits_flash(queries, values):
        return devices.flash(queries[None], keys[None], values[None], scaling)[0]
    first = num_tokens - num_queries
    size = max(1, most_scores // (num_heads * num_tokens))
    tiles = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        end = first + stop
        # SDPA aligns its own causal mask with the first key.
        is_square = first + start == 0
        mask = None
        if not is_square and stop - start > 1:
            mask = torch.ones(stop - start, end, dtype=torch.bool, device=queries.device).tril(first + start)
        tiles.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries[None, :, start:stop],
                keys[None, :, :end],
                values[None, :, :end],
                attn_mask=mask,
                is_causal=is_square and stop > 1,
                scale=scaling,
                enable_gqa=num_heads != keys.shape[0],
            )[0]
        )
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


@dataclass
class LayerQueries:
    """The queries of one layer, (num_heads, n, head_dim), in parts along n, and the scaling of its scores."""

    scaling: float
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Queries:
    """The scoring queries: how many are in place, their segments with weights; opening: as in `segment_weights`."""

    num_in_place: int = 1
    segments: tuple[Segment, ...] = ()
    weights: tuple[float, ...] = ()
    opening: int = 0


def opening_of_own_heads(
    pool: Any, slots: torch.Tensor, layers: Mapping[int, LayerQueries], config: PrefillConfig, found: Queries
) -> torch.Tensor:
    """Attention (num_tokens,) of the opening tokens by this rank's heads."""
    own = _own_heads(pool, slots, layers, _heads_by_default(layers, config))
    return opening_attention(own, found.num_in_place, found.opening)


def over_own_heads(
    pool: Any,
    slots: torch.Tensor,
    layers: Mapping[int, LayerQueries],
    config: PrefillConfig,
    rank: int = 0,
    found: Queries = Queries(),
) -> torch.Tensor:
    """This rank's scoring heads over a prompt: with head_reduction "max" the largest pooled attention (n, num_tokens),
    with "mean" the sum of their importance (num_tokens,). slots: (num_tokens,). config.scoring_heads count over all
    ranks.
    """
    heads = config.scoring_heads
    voters = _heads_by_default(layers, config) if heads is None else _chosen_heads(layers, heads, rank)
    own = _own_heads(pool, slots, layers, voters)
    if config.head_reduction == "mean":
        sums = [head_importance(head, found.num_in_place, found.segments, found.weights).sum(dim=0) for head in own]
        return torch.stack(sums).sum(dim=0) if sums else torch.zeros(len(slots), device=slots.device)
    if not voters:
        # Without voting heads on this rank: zeros, the least attention.
        num_queries = sum(query.shape[1] for query in next(iter(layers.values())).queries)
        return torch.zeros(num_queries, len(slots), device=slots.device)
    return largest_attention(own, config.pool_kernel, found.num_in_place)


def num_scoring_heads(layers: Mapping[int, LayerQueries], config: PrefillConfig, num_ranks: int) -> int:
    """Scoring heads over all ranks."""
    if config.scoring_heads is not None:
        return len(config.scoring_heads)
    return num_ranks * sum(map(len, _heads_by_default(layers, config).values()))


def _heads_by_default(layers: Mapping[int, LayerQueries], config: PrefillConfig) -> dict[int, Sequence[int]]:
    """All heads of this rank behind the first layers, by layer."""
    skipped = min(config.first_scoring_layer, (max(layers) + 1) // 2)
    return {index: range(found.queries[0].shape[0]) for index, found in layers.items() if index >= skipped}


def _chosen_heads(
    layers: Mapping[int, LayerQueries], heads: Sequence[tuple[int, int]], rank: int
) -> dict[int, Sequence[int]]:
    """This rank's heads among the chosen ones, by layer and by number on the rank."""
    unknown = {layer for layer, _ in heads} - set(layers)
    if unknown:
        raise ValueError(f"scoring_heads names layers {sorted(unknown)}, and the draft has {sorted(layers)}")
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        num_heads = layers[layer].queries[0].shape[0]
        if head // num_heads == rank:
            chosen.setdefault(layer, []).append(head - rank * num_heads)
    return dict(chosen)


def _own_heads(
    pool: Any, slots: torch.Tensor, layers: Mapping[int, LayerQueries], voters: Mapping[int, Sequence[int]]
) -> Iterator[ScoredLayer]:
    """The layers by key head: one head's keys and attention are held at a time."""
    for index, heads in sorted(voters.items()):
        found, buffer = layers[index], pool.get_key_buffer(index)
        queries = torch.cat(found.queries, dim=1)
        groups = queries.shape[0] // buffer.shape[1]
        for key_head in sorted({head // groups for head in heads}):
            own = torch.tensor([head for head in heads if head // groups == key_head])
            own_queries = queries[devices.to_device(own, queries.device)]
            yield ScoredLayer(own_queries, buffer[slots, key_head][None], found.scaling)
