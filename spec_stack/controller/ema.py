"""SGLang's adaptive rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import Policy, StepContext, StepRecord, check_gamma


@dataclass
class Ema(Policy):
    """One more than the exponential moving average of accepted tokens (SGLang's `--speculative-adaptive`).

    Parameters
    ----------
    weight : float
        Of the last step in the average, in (0, 1].
    start : float
        The average before any step.
    max_gamma : int
        The largest gamma.
    gammas : tuple of int
        Where only some can be chosen: the smallest that is not under the rule's. Empty: any can.
    """

    weight: float = 0.2
    start: float = 3.0
    max_gamma: int = MAX_GAMMA
    gammas: tuple[int, ...] = ()
    _average: float = field(init=False, repr=False)

    name = "ema"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if not 0 <= self.start <= MAX_GAMMA:
            raise ValueError(f"start must be 0 to {MAX_GAMMA}, got {self.start}")
        for gamma in self.gammas:
            check_gamma("gammas", gamma, least=1)
        self._average = self.start

    def choose(self, context: StepContext) -> int:
        wanted = min(round(self._average) + 1, self.max_gamma)
        # Up, not down: an average can never exceed the gamma in use, so that from 2 it would never reach 4.
        reachable = [gamma for gamma in self.gammas if gamma <= self.max_gamma]
        return min((gamma for gamma in reachable if gamma >= wanted), default=max(reachable, default=wanted))

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.num_drafted == 0:
            return
        self._average += self.weight * (record.num_drafted_accepted - self._average)
