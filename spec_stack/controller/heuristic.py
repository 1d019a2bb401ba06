"""Transformers' rule for assisted generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import Policy, StepContext, StepRecord, check_gamma


@dataclass
class Heuristic(Policy):
    """Two tokens more after full acceptance, else one less, never under one.

    Parameters
    ----------
    start : int
        The first gamma.
    max_gamma : int
        The largest.

    Notes
    -----
    `num_assistant_tokens_schedule="heuristic"` of transformers' assisted generation
    (https://huggingface.co/docs/transformers/main_classes/text_generation).
    """

    start: int = 5
    max_gamma: int = MAX_GAMMA
    _gamma: int = field(init=False, repr=False)

    name = "heuristic"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 1 <= self.start <= self.max_gamma:
            raise ValueError(f"start must be 1 to max_gamma ({self.max_gamma}), got {self.start}")
        self._gamma = self.start

    def choose(self, context: StepContext) -> int:
        return self._gamma

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.num_drafted == 0:
            return
        accepted_all = record.num_drafted_accepted == record.num_drafted
        self._gamma = min(self._gamma + 2, self.max_gamma) if accepted_all else max(self._gamma - 1, 1)
