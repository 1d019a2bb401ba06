"""A bandit that learns online which gamma and which confidence threshold give most tokens/s. No training, no model."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import product

from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gammas

# An arm whose weight has faded below this is tried again.
_FORGOTTEN = 0.05
_MAX_PENDING = 8


class _Rate:
    """Tokens per second over a discounted past."""

    def __init__(self, discount: float) -> None:
        self._discount = discount
        self._num_tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_tokens = self._num_tokens * self._discount + num_tokens
        self._seconds = self._seconds * self._discount + seconds

    @property
    def tokens_per_s(self) -> float:
        """0.0 until a step that took time has been added."""
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0


class _Arm:
    """Discounted sums of one arm's tokens and seconds, enough for the mean and spread of tokens - rate * seconds."""

    def __init__(self) -> None:
        self.weight = self.tokens = self.seconds = 0.0
        self.tokens2 = self.seconds2 = self.product = 0.0

    def decay(self, keep: float) -> None:
        self.weight *= keep
        self.tokens *= keep
        self.seconds *= keep
        self.tokens2 *= keep
        self.seconds2 *= keep
        self.product *= keep

    def add(self, num_tokens: int, seconds: float) -> None:
        self.weight += 1
        self.tokens += num_tokens
        self.seconds += seconds
        self.tokens2 += num_tokens * num_tokens
        self.seconds2 += seconds * seconds
        self.product += num_tokens * seconds

    def advantage(self, rate: float) -> tuple[float, float]:
        """Mean and standard error of tokens - rate * seconds; a prior of one step keeps the error over zero."""
        mean = (self.tokens - rate * self.seconds) / self.weight
        square = (self.tokens2 - 2 * rate * self.product + rate * rate * self.seconds2) / self.weight
        variance = max(square - mean * mean, 0.0)
        return mean, math.sqrt((variance * self.weight + 1.0) / (self.weight + 1) / self.weight)


@dataclass
class Bandit(Policy):
    """Thompson sampling over (gamma, threshold), on tokens gained over what the present rate would have given.

    Averaging tokens/s over steps would favour short steps; tokens - rate * seconds has its maximum where the ratio
    of the sums has. Arms are kept per precision, since costs differ. Mutated by every call.

    Parameters
    ----------
    gammas, thresholds : tuple
        Every pair is an arm: draft up to gamma, stop after a token under the threshold.
    discount : float
        Weight of an arm's past per step, in (0, 1); it keeps the bandit trying, since times change.
    dwell : int
        Steps an arm is kept once chosen.
    seed : int
        Of the sampling; equal seeds choose alike.
    """

    gammas: tuple[int, ...] = (1, 2, 4, 8)
    thresholds: tuple[float, ...] = (0.0, 0.5, 0.8)
    discount: float = 0.995
    dwell: int = 2
    seed: int = 0
    _arms: list[tuple[int, float]] = field(init=False, repr=False)
    _sums: dict[str, list[_Arm]] = field(init=False, repr=False, default_factory=dict)
    _rates: dict[str, _Rate] = field(init=False, repr=False, default_factory=dict)
    _random: random.Random = field(init=False, repr=False)
    _current: int = field(init=False, repr=False, default=0)
    _remaining: int = field(init=False, repr=False, default=0)
    # A server may tell how a step went while the next one runs already.
    _chosen: OrderedDict[int, tuple[int, bool]] = field(init=False, repr=False, default_factory=OrderedDict)

    name = "bandit"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not self.thresholds or any(not 0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError(f"thresholds must be one or more probabilities, got {self.thresholds}; 0 never stops")
        if not 0 < self.discount < 1:
            raise ValueError(f"discount must be between 0 and 1, got {self.discount}")
        if self.dwell < 1:
            raise ValueError(f"dwell must be 1 or more, got {self.dwell}")
        self._random = random.Random(self.seed)
        # One gamma 0 or 1 arm per gamma is enough: there is no second token that a threshold could hold back.
        pairs = product(self.gammas, self.thresholds)
        self._arms = [arm for arm in pairs if arm[0] > 1 or arm[1] == self.thresholds[0]]

    def choose(self, context: StepContext) -> int:
        if self._remaining == 0:
            self._current = self._sample(context.precision)
            self._remaining = self.dwell
        self._remaining -= 1
        gamma = self._arms[self._current][0]
        self._chosen.pop(context.step, None)
        self._chosen[context.step] = self._current, gamma > context.max_gamma
        if len(self._chosen) > _MAX_PENDING:
            self._chosen.popitem(last=False)
        return gamma

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.confidence[-1] >= self._arms[self._current][1]

    def observe(self, record: StepRecord) -> None:
        """Credit the arm. Prefill steps, steps cut short by the request's end and steps whose seconds are not known say
        nothing about one."""
        arm_index, was_cut = self._chosen.get(record.step, (self._current, False))
        if record.is_prefill or was_cut or not math.isfinite(record.seconds):
            return
        sums = self._precision(record.precision)
        for arm in sums:
            arm.decay(self.discount)
        sums[arm_index].add(record.num_tokens, record.seconds)
        self._rates[record.precision].add(record.num_tokens, record.seconds)

    def _precision(self, precision: str) -> list[_Arm]:
        if precision not in self._sums:
            self._sums[precision] = [_Arm() for _ in self._arms]
            self._rates[precision] = _Rate(self.discount)
        return self._sums[precision]

    def _sample(self, precision: str) -> int:
        sums = self._precision(precision)
        untried = [index for index, arm in enumerate(sums) if arm.weight < _FORGOTTEN]
        if untried:
            return self._random.choice(untried)
        rate = self._rates[precision].tokens_per_s
        draws = [self._random.gauss(*arm.advantage(rate)) for arm in sums]
        return draws.index(max(draws))
