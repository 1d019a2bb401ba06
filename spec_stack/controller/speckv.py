"""The SpecKV paper's policy (section 4.3), made causal: it uses the signals of the step before, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma, check_gammas
from spec_stack.controller.predictor import FILE_NAME, Network, load_step_predictor, step_features
from spec_stack.controller.step_times import USUAL_UNREAD, StepTimes
from spec_stack.controller.tuning import TUNING

SHIPPED = Path(__file__).parents[1] / "assets" / "draft" / FILE_NAME
"""The predictor of the embedded pair, for drafts without one of their own."""
# After idle steps the draft first catches up, which says nothing of the cost of drafting, so the next step tries again,
# so many times where look-ups come between.
_MOST_TRIES = 4

Objective = Literal["per_second", "per_step"]


@dataclass
class SpecKV(Policy):
    """The candidate with most expected tokens, acceptance_rate * gamma + 1, per measured second.

    Where no candidate is expected to beat plain decoding, nothing is drafted, and the smallest is tried now and then.
    The decision is made before the step, as in the paper, so an uncertain token cannot end a proposal.

    Parameters
    ----------
    gammas : tuple of int
        The candidates.
    objective : {"per_second", "per_step"}
        "per_step" is the paper's: it ignores a step's cost and so nearly always takes the largest.
    predictor : str, Path or Network
        A step predictor, or its file; the embedded pair's by default.
    start : int
        Gamma before any step with signals.

    Raises
    ------
    ValueError
        For an option out of range and a bad predictor file.
    """

    gammas: tuple[int, ...] = (2, 4, 6, 8)
    objective: Objective = "per_second"
    predictor: str | Path | Network = SHIPPED
    start: int = 4
    _rates: Network = field(init=False, repr=False)
    _signals: DraftSignals | None = field(init=False, repr=False, default=None)
    _times: StepTimes = field(init=False, repr=False, default_factory=StepTimes)
    _num_idle: int = field(init=False, repr=False, default=0)
    _wait: int = field(init=False, repr=False, default=TUNING.first_wait)
    _recent: float = field(init=False, repr=False, default=1.0)

    name = "speckv"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas, least=1)
        check_gamma("start", self.start)
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {list(get_args(Objective))}, got {self.objective!r}")
        named = self.predictor
        self._rates = named if isinstance(named, Network) else load_step_predictor(named)

    def use(self, times: StepTimes) -> None:
        self._times = times

    def choose(self, context: StepContext) -> int:
        if self._signals is None or context.last is None:
            return self.start
        expected = self._expected_tokens(self._signals, context.precision, self.gammas)
        cost = self._times.at(context)
        if self.objective == "per_step":
            return self.gammas[expected.index(max(expected))]
        if not cost.knows_plain:
            return 0
        # Scaled by the recent ratio of real to expected tokens: the predictor was trained elsewhere.
        tokens = [(each - 1) * self._recent + 1 for each in expected]
        rates = [each / cost.seconds(gamma) for each, gamma in zip(tokens, self.gammas, strict=True)]
        if max(rates) * cost.plain_s > 1:
            self._num_idle, self._wait = 0, TUNING.first_wait
            return self.gammas[rates.index(max(rates))]
        return min(self.gammas) if self._tries_again(context.draft_lag) else 0

    def _tries_again(self, draft_lag: int) -> bool:
        """Count an idle step. A try that does not pay doubles the wait; one that only catches up is repeated."""
        self._num_idle += 1
        if self._num_idle < self._wait:
            return False
        if draft_lag <= USUAL_UNREAD:
            self._num_idle, self._wait = 0, min(2 * self._wait, TUNING.last_wait)
        elif self._num_idle >= self._wait + _MOST_TRIES:
            self._num_idle = 0
        return True

    def _expected_tokens(self, signals: DraftSignals, precision: str, gammas: Sequence[int]) -> list[float]:
        """Equation 1: expected tokens of a step at each of these gammas."""
        rates = self._rates.acceptance_rates([step_features(signals, precision, gamma) for gamma in gammas])
        return [rate * gamma + 1 for rate, gamma in zip(rates, gammas, strict=True)]

    def observe(self, record: StepRecord) -> None:
        """Keep the step's signals for the next step, and how much of what they promised came true."""
        self._times.observe(record)
        if not record.signals:
            return
        if self._signals is not None and not record.is_prefill:
            expected = self._expected_tokens(self._signals, record.precision, [record.num_drafted])[0] - 1
            share = record.num_drafted_accepted / max(expected, 0.5)
            self._recent = min(max(self._recent + 0.1 * (share - self._recent), 0.0), 1.0)
        self._signals = record.signals
