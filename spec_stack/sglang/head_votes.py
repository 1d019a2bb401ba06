"""Have the heads of SGLang's draft vote on a prompt, from its queries and its KV pool. No SGLang here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_stack.config import PrefillConfig
from spec_stack.devices import to_device
from spec_stack.prefill.importance import mean_share, token_importance


@dataclass
class LayerQueries:
    """The queries of one layer, (num_heads, n, head_dim), in parts along n, and the scaling of its scores."""

    scaling: float
    queries: list[torch.Tensor] = field(default_factory=list)

    def between(self, start: int, stop: int | None = None) -> LayerQueries:
        """The queries from number `start` up to `stop`."""
        return LayerQueries(self.scaling, [torch.cat(self.queries, dim=1)[:, start:stop]])


def best_of_own_heads(
    pool: Any,
    slots: torch.Tensor,
    layers: Mapping[int, LayerQueries],
    config: PrefillConfig,
    rank: int = 0,
    num_asking: int = 1,
) -> torch.Tensor:
    """Pooled attention (n, num_tokens), the largest over the heads of this rank that vote; under `head_vote` "share"
    the mean of their shares (1, num_tokens), which one rank alone has all of.

    Parameters
    ----------
    pool
        The draft's own, with `get_key_buffer`.
    slots
        (num_tokens,), of the prompt.
    layers
        Queries (num_heads, n, head_dim) by layer, of this rank's heads.
    config
        For scoring_heads, which count over all ranks, skipped_layers, head_vote and the pool kernel.
    rank
        Of the tensor-parallel group.
    num_asking
        How many queries, the first ones, are those of the prompt's last tokens, which see nothing after themselves.
    """
    skipped = 0 if config.scoring_heads is not None else min(config.skipped_layers, (max(layers) + 1) // 2)
    voters = {index: _voters(index, found, config, rank) if index >= skipped else [] for index, found in layers.items()}
    unknown = {layer for layer, _ in config.scoring_heads or ()} - set(layers)
    if unknown:
        raise ValueError(f"scoring_heads names layers {sorted(unknown)}, and the draft has {sorted(layers)}")
    if not any(voters.values()):
        # Other ranks have those who vote, and no attention is the least there is.
        num_queries = sum(query.shape[1] for query in next(iter(layers.values())).queries)
        return torch.zeros(num_queries, len(slots), device=slots.device)
    if config.head_vote == "share":
        return mean_share(_own_heads(pool, slots, layers, voters), *config.forced_tokens, num_asking)[None]
    kept: list[torch.Tensor] = []

    def keep(best: torch.Tensor) -> torch.Tensor:
        kept.append(best)
        return best

    token_importance(_own_heads(pool, slots, layers, voters), config.pool_kernel, keep, num_asking)
    return kept[0]


def _voters(index: int, found: LayerQueries, config: PrefillConfig, rank: int) -> list[int]:
    """Heads of this rank that vote in a layer, by their number on it."""
    num_heads = found.queries[0].shape[0]
    if config.scoring_heads is None:
        return list(range(num_heads))
    return [
        head - rank * num_heads
        for layer, head in sorted(config.scoring_heads)
        if layer == index and head // num_heads == rank
    ]


def _own_heads(
    pool: Any, slots: torch.Tensor, layers: Mapping[int, LayerQueries], voters: Mapping[int, Sequence[int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Queries, keys and scaling, key head by key head: one head's keys and attention are all that is held at a time."""
    for index, found in sorted(layers.items()):
        queries, buffer = torch.cat(found.queries, dim=1), pool.get_key_buffer(index)
        groups = queries.shape[0] // buffer.shape[1]
        for head in sorted({voter // groups for voter in voters[index]}):
            own = torch.tensor([voter for voter in voters[index] if voter // groups == head])
            yield queries[to_device(own, queries.device)], buffer[slots, head][None], found.scaling
