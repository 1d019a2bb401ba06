"""A selection rule: who says which units of a prompt matter, and what he is shown. docs/add-a-selection-rule.md.

How it is used: subclass `SelectionRule`, put a line into `registry.SCORERS`, and name it: `PrefillConfig(scorer=...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.queries import Candidates, find_candidates
from spec_stack.prefill.units import Units


class Observer(Protocol):
    """Watches how a prompt is selected (`spec-stack explain`). Changes nothing in it."""

    def scored(self, evidence: Evidence) -> None:
        """Hear what there is to score the whole prompt by, once the draft has gone over it."""
        ...

    def voted(self, units: Units, scores: torch.Tensor) -> None:
        """Hear the rule's scores (num_units,), in a session those of the new text."""
        ...


@dataclass(frozen=True)
class Evidence:
    """The evidence to score a prompt by; in a session, the new text of a turn.

    Attributes
    ----------
    prompt_ids
        N tokens of the target.
    attention
        What the draft attended to, with `importance(config)` (N,); None where no draft was asked.
    protected
        Half-open spans of the system message and of the template's own tokens, sorted; the turns lie between them.
    pieces
        The text of every token, (N,); None without a tokenizer.
    importance
        (N,), in place of the attention's own, for whoever has computed it.
    observer
        Hears of the scores.
    """

    prompt_ids: Sequence[int]
    attention: CapturedAttention | None = None
    protected: Sequence[Span] = ()
    pieces: Sequence[str] | None = None
    importance: torch.Tensor | None = None
    observer: Observer | None = None

    def starting_at(self, first: int) -> Evidence:
        """The same of the text from token `first` on, by itself."""
        return Evidence(
            self.prompt_ids[first:],
            None if self.attention is None else self.attention.starting_at(first),
            [(max(start - first, 0), stop - first) for start, stop in self.protected if stop > first],
            None if self.pieces is None else self.pieces[first:],
            None if self.importance is None else self.importance[first:],
            self.observer,
        )

    def token_importance(self, config: PrefillConfig) -> torch.Tensor:
        """Importance (N,) of every token by the draft's attention. Raises ValueError where no draft was asked."""
        if self.importance is not None:
            return self.importance
        if self.attention is None:
            raise ValueError("the draft's attention is missing")
        return self.attention.importance(config)

    @property
    def candidates(self) -> Candidates:
        """Where the question may stand."""
        return find_candidates(len(self.prompt_ids), self.pieces, self.protected)


class SelectionRule(ABC):
    """Scores the units of a prompt. One object serves many prompts, so it keeps nothing of them."""

    needs_attention: ClassVar[bool] = True
    """True where the draft goes over the whole prompt for it. Without, pruning costs no pass of the draft."""

    @abstractmethod
    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        """Scores (num_units,), the higher the sooner kept.

        Parameters
        ----------
        evidence : Evidence
            The prompt, and what is known of it.
        units : Units
            What is kept or dropped whole: lines, or chunks.
        config : PrefillConfig
            How prompts are scored.
        """
