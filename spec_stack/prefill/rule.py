"""The selection rule: which segments of a prompt matter. docs/add-a-selection-rule.md.

Subclass `SelectionRule`, add a line to `registry.SCORERS`, and name it: `PrefillConfig(scorer=...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.explanation import Explanation
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import Candidates, find_candidates, question_tokens
from spec_stack.prefill.segments import Segments
from spec_stack.prefill.words import Question, read_question
from spec_stack.types import Selection


class Observer:
    """Observes a selection (`generate(explain=True)`) without changing it. In a session all but `scored` receive the
    new text's part."""

    def scored(self, inputs: ScoringInputs) -> None:
        """Receive the inputs of the whole prompt, after the draft's pass."""

    def part(self, name: str, scores: torch.Tensor) -> None:
        """Receive scores (num_segments,) after what is named raised them; the last part is the rule's score."""

    def chosen(
        self,
        segments: Segments,
        scores: torch.Tensor,
        kept: Collection[int],
        ends: Collection[int],
        always: Collection[int],
    ) -> None:
        """Receive the rule's scores (num_segments,), the kept tokens, and those kept for their place or always."""

    def explanation(self, cached: Sequence[int], selection: Selection) -> Explanation | None:
        """The explanation, if this observer makes one. cached: positions in the target's cache before the prefill."""
        return None


@dataclass(frozen=True)
class ScoringInputs:
    """What a rule scores a prompt by; in a session, the new text of a turn.

    Attributes
    ----------
    text
        The prompt of N tokens, with its turns and template.
    attention
        The draft's attention, with `importance(config)` (N,); None without a pass of the draft, and of a later turn.
    importance
        (N,), precomputed; used instead of the attention's own.
    question
        What is asked, precomputed.
    observer
        Receives the scores.
    answer_attention
        Mean attention (N,) of the draft's own answer, where it is checked.
    """

    text: PromptText
    attention: CapturedAttention | None = None
    importance: torch.Tensor | None = None
    observer: Observer | None = None
    question: Question | None = None
    answer_attention: torch.Tensor | None = None

    @property
    def prompt_ids(self) -> Sequence[int]:
        """N tokens of the target."""
        return self.text.token_ids

    @property
    def pieces(self) -> Sequence[str] | None:
        """The text of every token, (N,); None without a tokenizer."""
        return self.text.pieces

    def starting_at(self, first: int) -> ScoringInputs:
        """The inputs of the text from token `first` on; its question may stand before it."""
        if not first:
            return self
        importance = None if self.importance is None else self.importance[first:]
        question = self.asked(first).starting_at(first)
        return ScoringInputs(self.text.starting_at(first), None, importance, self.observer, question)

    def asked(self, first: int = 0) -> Question:
        """The question's words, by `question_tokens` of the text from token `first` on."""
        if self.question is not None:
            return self.question
        found = self.candidates.reaching(first)
        # Where texts are not known, a segment may begin in the text before.
        old = {at for start, stop in found.segments if start < first < stop for at in range(start, first)}
        return read_question(self.text, question_tokens(found) - old)

    def note_part(self, name: str, scores: torch.Tensor) -> None:
        """Tell the observer, if any, the scores (num_segments,) after what is named raised them."""
        if self.observer is not None:
            self.observer.part(name, scores)

    def token_importance(self, config: PrefillConfig) -> torch.Tensor:
        """Importance (N,) of every token by the draft's attention. Raises ValueError without a pass of the draft."""
        if self.importance is not None:
            return self.importance
        if self.attention is None:
            raise ValueError("the draft's attention is missing")
        return self.attention.importance(config)

    @cached_property
    def candidates(self) -> Candidates:
        """The segments that may hold the question."""
        known = None if self.attention is None else self.attention.candidates
        return known or find_candidates(self.text)

    def weights_by_words(self, first: int = 0) -> dict[Span, float]:
        """Weights, 0 to 1, of the scoring segments without a draft. first: as in `asked`."""
        found = self.candidates.reaching(first)
        asking = question_tokens(found)
        return {span: float(not asking.isdisjoint(range(*span))) for span in found.segments}

    def weights_by_attention(self, config: PrefillConfig) -> dict[Span, float]:
        """Weights, 0 to 1, of the scoring queries' segments, in prompt tokens; empty without a pass of the draft."""
        if self.attention is None:
            return {}
        if not config.queries_from_prompt:
            return {(len(self.prompt_ids) - 1, len(self.prompt_ids)): 1.0}
        ranges = self.attention.ranges
        spans = [_in_target(segment.span, ranges) for segment in self.attention.segments]
        return dict(zip(spans, self.attention.weights(config), strict=True))


def _in_target(span: Span, ranges: Sequence[Span] | None) -> Span:
    """Target token span of a draft token span."""
    if ranges is None:
        return span
    shared = [at for at, (start, stop) in enumerate(ranges) if max(start, span[0]) < min(stop, span[1])]
    return shared[0], shared[-1] + 1


class SelectionRule(ABC):
    """Scores the segments of a prompt. One object serves many prompts, so it must be stateless."""

    needs_attention: ClassVar[bool] = True
    """True where the draft goes over the whole prompt for it. Without, pruning costs no pass of the draft."""

    @abstractmethod
    def score(self, inputs: ScoringInputs, segments: Segments, config: PrefillConfig) -> torch.Tensor:
        """Scores (num_segments,); segments with higher scores are kept first.

        Parameters
        ----------
        inputs : ScoringInputs
            The prompt with its attention, texts and protected spans.
        segments : Segments
            What is kept or dropped whole: lines, or chunks.
        config : PrefillConfig
            How prompts are scored.
        """
