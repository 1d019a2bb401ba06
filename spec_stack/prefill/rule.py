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
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.units import Units

# Where nobody says where the question begins: the tokens towards the end over which a word's weight halves.
_HALF_LIFE = 12


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
    question
        Half-open span of the tokens that are what is asked, or that end with it (the last user turn); None where
        nobody told.
    pieces
        The text of every token, (N,); None without a tokenizer.
    importance
        (N,), in place of the attention's own, for whoever has computed it.
    observer
        Hears of the scores.
    """

    prompt_ids: Sequence[int]
    attention: CapturedAttention | None = None
    question: tuple[int, int] | None = None
    pieces: Sequence[str] | None = None
    importance: torch.Tensor | None = None
    observer: Observer | None = None

    def starting_at(self, first: int) -> Evidence:
        """The same of the text from token `first` on, by itself."""
        question = self.question and (max(self.question[0] - first, 0), self.question[1] - first)
        return Evidence(
            self.prompt_ids[first:],
            None if self.attention is None else self.attention.starting_at(first),
            question if question and question[1] > 0 else None,
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

    def asked(self, config: PrefillConfig) -> tuple[int, int]:
        """Half-open span of the tokens in which the question stands: of a span that is longer than config.anchor_tail
        tokens, or that nobody told, its end."""
        start, stop = self.question or (0, len(self.prompt_ids))
        return max(start, stop - config.anchor_tail), stop

    def half_life(self, config: PrefillConfig) -> float:
        """Tokens of `asked`, from its end on, over which a word's weight halves; infinite where it is the question and
        nothing else."""
        if self.question is None or self.question[1] - self.question[0] > config.anchor_tail:
            return _HALF_LIFE
        return float("inf")


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
