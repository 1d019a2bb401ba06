"""The draft's attention captured during a pass over a prompt, and the importance of the prompt's tokens.

One pass of `scoring.run_draft` serves any configuration of heads, layers, reduction or pooling.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span, map_importance
from spec_stack.prefill.importance import (
    NO_LAYER,
    Ranks,
    ScoredLayer,
    Segment,
    choose_heads,
    head_importance,
    largest_attention,
    last_attention,
    over_queries,
    segment_weights,
)
from spec_stack.prefill.queries import Candidates

T = TypeVar("T")
Parts = Generator[None, None, T]
"""Work in parts: it yields after each, and returns its result."""


def run(parts: Parts[T]) -> T:
    """The result of all parts at once."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class CapturedLayer(Protocol):
    """One attention layer: queries, one (num_heads, n, head_dim) per forward, and keys (num_kv_heads, num_cached,
    head_dim); None where a sliding window hides some of them.
    """

    scaling: float
    queries: list[torch.Tensor]
    keys: torch.Tensor | None
    sinks: torch.Tensor | None


def scored_layers(captured: Mapping[int, CapturedLayer], num_draft_tokens: int) -> dict[int, ScoredLayer]:
    """The captured layers over the prompt's keys, without those whose window hides a part of it."""
    return {
        index: ScoredLayer(
            torch.cat(layer.queries, dim=1), layer.keys[:, :num_draft_tokens], layer.scaling, layer.sinks
        )
        for index, layer in captured.items()
        if layer.keys is not None
    }


def scoring_heads_by_layer(layers: Collection[int], config: PrefillConfig) -> dict[int, list[int] | None]:
    """The scoring ones of the captured layers, each with its scoring heads; None is all."""
    if config.scoring_heads is None:
        # No more than half of a shallow draft is skipped.
        skipped = min(config.first_scoring_layer, (max(layers, default=0) + 1) // 2)
        return dict.fromkeys([index for index in layers if index >= skipped] or layers)
    heads = {at: [head for layer, head in config.scoring_heads if layer == at] for at in layers}
    return {index: chosen for index, chosen in heads.items() if chosen}


@dataclass(frozen=True)
class CapturedAttention:
    """The scoring queries and the prompt's keys, of the layers that see the whole prompt.

    layers: by index, with this rank's heads. num_in_place: the first queries, of the prompt's own last tokens. ranges:
    for every target token its half-open range of draft tokens, for another tokenizer. segments: of the queries, in
    draft tokens; empty where all count alike. candidates: of the whole prompt, in target tokens, that the segments come
    from.
    """

    layers: Mapping[int, ScoredLayer]
    num_in_place: int = 1
    ranges: Sequence[Span] | None = None
    segments: tuple[Segment, ...] = ()
    candidates: Candidates | None = None
    ranks: Ranks = field(default_factory=Ranks, compare=False)

    def importance(self, config: PrefillConfig) -> torch.Tensor:
        """Importance (num_prompt_tokens,), fp32, on the host (SpecPrefill, https://arxiv.org/abs/2502.02789, sections
        3.2.1-3.2.3, with `head_reduction="max"`).

        Raises ValueError where no layer sees the whole prompt, or the attention is not finite.
        """
        return run(self.importance_in_parts(config))

    def importance_in_parts(self, config: PrefillConfig) -> Parts[torch.Tensor]:
        """`importance`; a part ends before every collective of the ranks, which must not fail one by one."""
        weights = yield from self._weights_in_parts(config)
        scores = self.reduce_heads(config, weights)
        yield
        if config.head_reduction == "mean":
            importance = self.ranks.sum(scores) / self.num_scoring_heads(config)
        else:
            importance = over_queries(self.ranks.max(scores), self.segments, weights)
        return self._of_target(_finite(importance).cpu())

    def weights(self, config: PrefillConfig) -> list[float]:
        """The weight, up to 1, of each segment's queries, by all heads of the scoring layers."""
        return run(self._weights_in_parts(config))

    def _weights_in_parts(self, config: PrefillConfig) -> Parts[list[float]]:
        if not self.segments:
            return []
        if self.candidates is not None and self.candidates.is_given:
            return [float(segment.asks) for segment in self.segments]
        layers = (self.layers[at] for at in scoring_heads_by_layer(self.layers, config))
        attention = last_attention(layers, self.num_in_place)
        yield
        return segment_weights(self.ranks.sum(attention) / self.ranks.num, self.segments)

    def reduce_heads(self, config: PrefillConfig, weights: Sequence[float]) -> torch.Tensor:
        """Of this rank's scoring heads: with head_reduction "mean" the sum of their importance
        (num_draft_tokens,), with "max" the largest pooled attention (n, num_draft_tokens) of the n queries."""
        is_mean, some = config.head_reduction == "mean", next(iter(self.layers.values()), None)
        if some is None:
            raise ValueError(NO_LAYER)
        # What a rank without scoring heads adds is the least attention.
        shape = some.keys.shape[1:2] if is_mean else (some.queries.shape[1], some.keys.shape[1])
        scores = torch.zeros(shape, device=some.keys.device)
        for layer in self.scoring_layers(config):
            # A model that is split has layers on several devices.
            if is_mean:
                heads = head_importance(layer, self.num_in_place, self.segments, weights)
                scores = scores + heads.sum(dim=0).to(scores.device)
            else:
                largest = largest_attention(layer, config.pool_kernel, self.num_in_place)
                scores = torch.maximum(scores, largest.to(scores.device))
        return scores

    def num_scoring_heads(self, config: PrefillConfig) -> int:
        """Scoring heads over all ranks."""
        heads = scoring_heads_by_layer(self.layers, config).items()
        return sum(self.ranks.num * len(self.layers[at].queries) if own is None else len(own) for at, own in heads)

    def by_head(self, config: PrefillConfig) -> dict[tuple[int, int], torch.Tensor]:
        """Importance (num_prompt_tokens,) by every (layer, head) alone; head_reduction "mean" is their mean."""
        queries = self.num_in_place, self.segments, self.weights(config)
        return {
            (index, head): self._of_target(_finite(importance))
            for index, layer in self.layers.items()
            for head, importance in enumerate(head_importance(layer, *queries).cpu())
        }

    def scoring_layers(self, config: PrefillConfig) -> Iterator[ScoredLayer]:
        """The scoring layers, each with its scoring heads of this rank; one layer is made at a time."""
        for at, heads in scoring_heads_by_layer(self.layers, config).items():
            layer = self.layers[at]
            first, num_heads = self.ranks.rank * len(layer.queries), len(layer.queries)
            if heads is None:
                yield layer
            elif own := [head - first for head in heads if first <= head < first + num_heads]:
                yield choose_heads(layer, own)

    def _of_target(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.ranges is None else map_importance(scores, self.ranges)


def _finite(importance: torch.Tensor) -> torch.Tensor:
    """Finite importance. Raises ValueError."""
    if not bool(torch.isfinite(importance).all()):
        raise ValueError("the draft's attention is not finite")
    return importance
