"""The draft's attention while it went over a prompt, and the importance of the prompt's tokens by it.

How it is used: `scoring.look_at` makes a `CapturedAttention` with one pass of the draft. `importance(config)` gives
what the configuration asks for; another configuration of heads, layers, vote or pooling needs no other pass, which is
how a calibration and the experiments judge many rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span, map_importance
from spec_stack.prefill.importance import (
    ScoredLayer,
    Segment,
    choose_heads,
    head_importance,
    mean_importance,
    opening_attention,
    segment_weights,
    token_importance,
)


class CapturedLayer(Protocol):
    """The capture of one attention layer: queries, one (num_heads, n, head_dim) tensor per forward, and keys
    (num_kv_heads, num_cached, head_dim); None where a sliding window hides some of them."""

    scaling: float
    queries: list[torch.Tensor]
    keys: torch.Tensor | None
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class CapturedAttention:
    """The scoring queries, and the keys of the prompt, of the layers that see the whole of it.

    Parameters
    ----------
    layers : mapping of int to ScoredLayer
        By the layer's index: queries (num_heads, n, head_dim), keys (num_kv_heads, num_draft_tokens, head_dim), scaling
        and sinks.
    num_in_place : int
        How many of the n queries, the first ones, are the prompt's last tokens' own; those after them come behind it.
    ranges : sequence of (int, int), optional
        For every token of the target its half-open range of the draft's, where the draft has another tokenizer.
    first : int
        The token of the target from which on importance is given.
    segments : tuple of Segment
        Of the queries, in the draft's tokens, where the question may stand in several places; empty where all queries
        count alike.
    opening : int
        How many of the queries in place open the answer.
    """

    layers: Mapping[int, ScoredLayer]
    num_in_place: int = 1
    ranges: Sequence[Span] | None = None
    first: int = 0
    segments: tuple[Segment, ...] = ()
    opening: int = 0

    @classmethod
    def of(
        cls,
        captured: Mapping[int, CapturedLayer],
        num_draft_tokens: int,
        num_in_place: int = 1,
        ranges: Sequence[Span] | None = None,
        segments: Sequence[Segment] = (),
        opening: int = 0,
    ) -> CapturedAttention:
        """Put together what was captured; layers whose window hides a part of the prompt are left out."""
        layers: dict[int, ScoredLayer] = {}
        for index, layer in captured.items():
            if layer.keys is not None:
                queries, keys = torch.cat(layer.queries, dim=1), layer.keys[:, :num_draft_tokens]
                layers[index] = queries, keys, layer.scaling, layer.sinks
        return cls(layers, num_in_place, ranges, segments=tuple(segments), opening=opening)

    def starting_at(self, first: int) -> CapturedAttention:
        """The same, with importance of the tokens from `first` on (the new text of a turn)."""
        return replace(self, first=first)

    def importance(self, config: PrefillConfig) -> torch.Tensor:
        """Importance (num_prompt_tokens - first,), fp32, on the host.

        Parameters
        ----------
        config
            For scoring_heads or skipped_layers, head_vote and pool_kernel.

        Raises
        ------
        ValueError
            Where no layer sees the whole prompt, a chosen head is not there, or the attention is not finite.
        """
        layers = self.voting(config)
        queries = self.num_in_place, self.segments, self.weights(config)
        if config.head_vote == "mean":
            scores = mean_importance(layers, *queries)
        else:
            scores = token_importance(layers, config.pool_kernel, *queries)
        return self._of_target(scores.cpu())

    def weights(self, config: PrefillConfig) -> list[float]:
        """How much the queries of each segment count, up to 1, by all heads behind the skipped layers."""
        if not self.segments:
            return []
        layers = self.voting(replace(config, scoring_heads=None))
        attention = opening_attention(layers, self.num_in_place, self.opening)
        return segment_weights(attention, self.segments, self.opening)

    def by_head(self, config: PrefillConfig) -> dict[tuple[int, int], torch.Tensor]:
        """Importance (num_prompt_tokens - first,) by every (layer, head) alone; head_vote "mean" is their mean."""
        queries = self.num_in_place, self.segments, self.weights(config)
        return {
            (index, head): self._of_target(importance)
            for index, layer in self.layers.items()
            for head, importance in enumerate(head_importance(layer, *queries).cpu())
        }

    def voting(self, config: PrefillConfig) -> list[ScoredLayer]:
        """The layers that vote, each with its heads that do."""
        if config.scoring_heads is None:
            # No more than half of a shallow draft is skipped.
            skipped = min(config.skipped_layers, (max(self.layers, default=0) + 1) // 2)
            return [layer for index, layer in self.layers.items() if index >= skipped] or list(self.layers.values())
        by_layer: dict[int, list[int]] = {}
        for index, head in config.scoring_heads:
            by_layer.setdefault(index, []).append(head)
        chosen = [choose_heads(layer, by_layer[index]) for index, layer in self.layers.items() if index in by_layer]
        return chosen

    def _of_target(self, scores: torch.Tensor) -> torch.Tensor:
        mapped = scores if self.ranges is None else map_importance(scores, self.ranges)
        return mapped[self.first :]
