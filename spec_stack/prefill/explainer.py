"""Notes what kept each token of a prompt while it is selected."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.explanation import Explanation, KeptSpan, ScoringQuery
from spec_stack.prefill.rule import Observer, ScoringInputs
from spec_stack.prefill.segments import Segments
from spec_stack.types import Selection


class Explainer(Observer):
    """Notes the scores of one prompt and what kept its segments.

    pieces: the text of every token, (N,). first: tokens of earlier turns; `prefill.selection.select` sees the rest.
    """

    def __init__(self, pieces: Sequence[str], config: PrefillConfig, first: int = 0) -> None:
        self._pieces, self._config, self._first = pieces, config, first
        self._importance: list[float] | None = None
        self._queries: list[ScoringQuery] = []
        self._parts: dict[str, torch.Tensor] = {}
        self._reasons: dict[int, str] = {}

    def scored(self, inputs: ScoringInputs) -> None:
        by_words = self._config.scorer == "bm25"
        weights = inputs.weights_by_words(self._first) if by_words else inputs.weights_by_attention(self._config)
        starts = self._starts()
        queries = [ScoringQuery(starts[start], starts[stop], weight) for (start, stop), weight in weights.items()]
        self._queries = sorted(queries, key=lambda query: -query.weight)
        self._importance = None if inputs.importance is None else inputs.importance.tolist()

    def part(self, name: str, scores: torch.Tensor) -> None:
        self._parts[name] = scores.cpu()

    def chosen(
        self,
        segments: Segments,
        scores: torch.Tensor,
        kept: Collection[int],
        ends: Collection[int],
        always: Collection[int],
    ) -> None:
        """Note what kept each token: the first part of its segment's score that reaches the best segment left out."""
        inside = torch.zeros(segments.num_tokens, dtype=torch.bool)
        inside[sorted(kept)] = True
        is_left_out = torch.bincount(segments.owner[~inside], minlength=len(segments)) > 0
        scores = scores.cpu()
        enough = scores.clamp(max=scores[is_left_out].max()) if bool(is_left_out.any()) else scores
        names = ["score"] * len(segments)
        # The scores of a rule over another one are its own.
        parts = self._parts if self._parts and torch.equal([*self._parts.values()][-1], scores) else {}
        for name, part in reversed(parts.items()):
            for segment in torch.nonzero(part >= enough)[:, 0].tolist():
                names[segment] = name
        owner = segments.owner.tolist()
        for position in kept:
            reason = "protected" if position in always else "ends" if position in ends else names[owner[position]]
            self._reasons[self._first + position] = reason

    def explanation(self, cached: Sequence[int], selection: Selection) -> Explanation:
        reasons = dict.fromkeys(selection.positions, "recalled") | dict.fromkeys(cached, "cached")
        is_pruned = selection.num_new < selection.num_prompt_tokens - self._first
        new = selection.positions[len(selection.positions) - selection.num_new :]
        reasons |= {position: self._reasons[position] if is_pruned else "dense" for position in new}
        return Explanation(list(self._pieces), list(self._spans(reasons)), self._queries, self._importance)

    def _spans(self, reasons: dict[int, str]) -> Iterator[KeptSpan]:
        """The kept tokens as spans of one reason each."""
        starts = self._starts()
        # A token's place among the kept ones less its place in the prompt is the same within a run.
        runs = groupby(enumerate(sorted(reasons)), lambda each: (each[1] - each[0], reasons[each[1]]))
        for (_, reason), run in runs:
            positions = [position for _, position in run]
            yield KeptSpan(starts[positions[0]], starts[positions[-1] + 1], reason, len(positions))

    def _starts(self) -> list[int]:
        """The characters before each token, (N + 1,)."""
        return list(accumulate(map(len, self._pieces), initial=0))
