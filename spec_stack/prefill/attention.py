"""The draft's attention captured during a pass over a prompt, and the importance of the prompt's tokens.

One pass of `scoring.run_draft` serves any configuration of heads, layers, vote or pooling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    merge_questions,
    opening_attention,
    segment_weights,
    token_importance,
)
from spec_stack.prefill.queries import Candidates


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


def voting_heads(layers: Collection[int], config: PrefillConfig) -> dict[int, list[int] | None]:
    """The voting ones of the captured layers, each with its voting heads; None is all."""
    if config.scoring_heads is None:
        # No more than half of a shallow draft is skipped.
        skipped = min(config.first_scoring_layer, (max(layers, default=0) + 1) // 2)
        return dict.fromkeys([index for index in layers if index >= skipped] or layers)
    heads = {at: [head for layer, head in config.scoring_heads if layer == at] for at in layers}
    return {index: chosen for index, chosen in heads.items() if chosen}


def question_layers(layers: Collection[int], config: PrefillConfig) -> list[int]:
    """The captured layers of which all heads find the question: the voting ones, or with chosen heads the last quarter
    of the layers up to the last of these, however many have run."""
    if config.scoring_heads is None:
        return list(voting_heads(layers, config))
    last = max(layer for layer, _ in config.scoring_heads)
    needed = sorted(at for at in layers if at <= last)
    return needed[-max(1, len(needed) // 4) :]


@dataclass(frozen=True)
class CapturedAttention:
    """The scoring queries and the prompt's keys, of the layers that see the whole prompt.

    layers: by index. num_in_place: the first queries, of the prompt's own last tokens. ranges: for every target token
    its half-open range of draft tokens, for another tokenizer. segments: of the queries, in draft tokens; empty where
    all count alike. opening: queries in place that open the answer. candidates: of the whole prompt, in target tokens,
    that the segments come from.
    """

    layers: Mapping[int, ScoredLayer]
    num_in_place: int = 1
    ranges: Sequence[Span] | None = None
    segments: tuple[Segment, ...] = ()
    opening: int = 0
    candidates: Candidates | None = None

    def importance(self, config: PrefillConfig) -> torch.Tensor:
        """Importance (num_prompt_tokens,), fp32, on the host.

        Raises ValueError where no layer sees the whole prompt, or the attention is not finite.
        """
        layers = self.voting(config)
        queries = self.num_in_place, self.segments, self.weights(config)
        if config.head_reduction == "mean":
            scores = mean_importance(layers, *queries)
        else:
            scores = token_importance(layers, config.pool_kernel, *queries)
        return self._of_target(scores.cpu())

    def weights(self, config: PrefillConfig) -> list[float]:
        """The weight, up to 1, of each segment's queries, by all heads of the `question_layers`."""
        if not self.segments:
            return []
        if self.candidates is not None and self.candidates.is_given:
            return [float(segment.is_question) for segment in self.segments]
        layers = [self.layers[at] for at in question_layers(self.layers, config)]
        attention = opening_attention(layers, self.num_in_place, self.opening)
        return segment_weights(attention, self.segments, self.opening)

    def by_head(self, config: PrefillConfig) -> dict[tuple[int, int], torch.Tensor]:
        """Importance (num_prompt_tokens,) by every (layer, head) alone; for one question, head_reduction "mean" is
        their mean."""
        queries = self.num_in_place, self.segments, self.weights(config)
        return {
            (index, head): self._of_target(merge_questions(importance))
            for index, layer in self.layers.items()
            for head, importance in enumerate(head_importance(layer, *queries).cpu())
        }

    def voting(self, config: PrefillConfig) -> list[ScoredLayer]:
        """The voting layers, each with its voting heads."""
        heads = voting_heads(self.layers, config)
        return [self.layers[at] if own is None else choose_heads(self.layers[at], own) for at, own in heads.items()]

    def _of_target(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.ranges is None else map_importance(scores, self.ranges)
