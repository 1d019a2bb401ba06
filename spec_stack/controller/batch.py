"""One gamma for a whole batch, chosen before it drafts: the one that minimises the requests' summed time per token.

A server's step has fixed shapes, so a gamma is chosen by what the requests' earlier steps accepted and took.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spec_stack.config import DecodeConfig
from spec_stack.controller.base import BatchRequest, Policy, StepContext, StepRecord, check_gammas
from spec_stack.controller.step_times import SHORTEST_S, DiscountedCurve, PerContextLength, length_scale
from spec_stack.controller.tuning import TUNING

Floats = NDArray[np.float64]
# Requests that are remembered, and steps whose result may be outstanding.
_MAX_REQUESTS, _MAX_PENDING = 4096, 8
_TYPICAL_ACCEPTANCE = 0.7
# What a wrong and a right token count in averages of acceptance: the odds of 0 and 1 are 0 and infinite.
_WRONG, _RIGHT = 0.02, 0.98
# An unmeasured gamma is tried where its expected wait is within this factor of the best.
_TRIAL_MARGIN = 0.2


class AcceptanceRates:
    """Moving averages of acceptance: of each request, of all, and of each place of a proposal given the ones before it.

    weight: of the last step in a request's average.
    """

    def __init__(self, max_gamma: int, weight: float) -> None:
        self._weight = weight
        self._requests: dict[str, float] = {}
        self._typical = _TYPICAL_ACCEPTANCE
        self._by_place = [_TYPICAL_ACCEPTANCE] * max_gamma

    def observe(self, request_id: str, gamma: int, num_accepted: int) -> None:
        """Learn from one proposal; tokens after the first rejected one tell nothing."""
        num_accepted = min(num_accepted, gamma)
        num_judged = min(num_accepted + 1, gamma)
        rate = _WRONG + (_RIGHT - _WRONG) * num_accepted / num_judged
        known = self._requests.pop(request_id, self._typical)
        self._requests[request_id] = known + self._weight * (rate - known)
        if len(self._requests) > _MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        self._typical += 0.1 * self._weight * (rate - self._typical)
        for place in range(num_judged):
            outcome = _RIGHT if place < num_accepted else _WRONG
            self._by_place[place] += 0.5 * self._weight * (outcome - self._by_place[place])

    def expected_accepted_tokens(self, members: Sequence[BatchRequest]) -> Floats:
        """Expected accepted tokens per request and gamma from 0 on, (num_members, max_gamma + 1)."""
        own = [self._requests.get(member.request_id, self._typical) for member in members]
        rates = np.array([*own, self._typical, *self._by_place])
        odds = rates / (1 - rates)
        # A request's odds at a place: the place's, times its own over the typical ones.
        odds = (odds[: len(own)] / odds[len(own)])[:, None] * odds[len(own) + 1 :]
        expected = np.zeros((len(members), len(self._by_place) + 1))
        (odds / (1 + odds)).cumprod(axis=1).cumsum(axis=1, out=expected[:, 1:])
        for row, member in enumerate(members):
            if member.max_gamma < expected.shape[1]:
                expected[row, member.max_gamma :] = expected[row, member.max_gamma]
        return expected


@dataclass
class BatchThroughput(Policy):
    """argmin over gamma of the sum over requests of a step's seconds over its expected tokens.

    Seconds are a curve over gamma by batch size, and acceptance a moving average. A gamma that may be the best is
    tried. The last gamma stays where another saves too little.

    Parameters
    ----------
    gammas : tuple of int
        The candidates; include 0 to allow plain decoding.
    weight : float
        Of the last step in a request's acceptance, in (0, 1].

    Notes
    -----
    Every reply is finite, so seconds per token count, and their sum is the harmonic mean of the requests' speeds: the
    slowest request sets the pace.

    Records of one step carry the same step number and each an equal share of the seconds. A record whose seconds are
    not finite updates acceptance alone.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    # Of a step's seconds over `_relative_s`.
    _seconds: PerContextLength[DiscountedCurve] = field(init=False, repr=False)
    _rates: AcceptanceRates = field(init=False, repr=False)
    # Steps without a result, by number.
    _pending: OrderedDict[int, StepContext] = field(init=False, repr=False, default_factory=OrderedDict)
    # Steps with known seconds, by batch size, context length and gamma.
    _num_timed: Counter[tuple[tuple[int, int], int]] = field(init=False, repr=False, default_factory=Counter)
    # The newest gamma chosen as the best, or nearly so.
    _usual: int = field(init=False, repr=False, default=-1)
    _num_chosen: int = field(init=False, repr=False, default=0)
    _in_vain: int = field(init=False, repr=False, default=0)
    _last: StepContext | None = field(init=False, repr=False, default=None)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        self._candidates = sorted(self.gammas)
        self._rates = AcceptanceRates(self._candidates[-1], self.weight)
        # Without a draft a step lacks the draft's fixed cost, so the curve is not convex.
        knots = [float(gamma) for gamma in self._candidates[:-1]]
        self._seconds = PerContextLength(partial(DiscountedCurve, knots, TUNING.batch_shrinkage, False))

    def choose(self, context: StepContext) -> int:
        self._last = self._pending[context.step] = context
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)
        gammas = [gamma for gamma in self._candidates if gamma <= context.max_gamma]
        if not gammas:
            return 0
        newest = "" if context.last is None else context.last.request_id
        expected = self.expected_accepted_tokens(context.members or (BatchRequest(newest),))
        seconds = np.array(self._expected_s(context, context.batch_size)[: len(gammas)])
        waits: list[float] = (seconds * (1 / (1 + expected[:, gammas])).sum(axis=0)).tolist()
        best = waits.index(min(waits))
        if self._usual in gammas and waits[gammas.index(self._usual)] < TUNING.least_speedup * waits[best]:
            best = gammas.index(self._usual)
        self._usual = gammas[best]
        self._num_chosen += 1
        self._in_vain += 1
        if self._in_vain > TUNING.check_every and not self._num_timed:
            # No step had known seconds: the default gamma then.
            return max((gamma for gamma in gammas if gamma <= DecodeConfig.gamma), default=gammas[0])
        return self._to_try(context, gammas, waits, best)

    def expected_accepted_tokens(self, members: Sequence[BatchRequest]) -> Floats:
        """Expected accepted tokens per request and gamma from 0 on, (num_members, max(gammas) + 1)."""
        return self._rates.expected_accepted_tokens(members)

    def _to_try(self, context: StepContext, gammas: Sequence[int], waits: Sequence[float], best: int) -> int:
        """The best gamma, or now and then a candidate whose unknown seconds may make it better."""
        num_timed = {gamma: self._num_timed[_shape_of(context), gamma] for gamma in gammas}
        if self._num_chosen % (2 * TUNING.check_every) == 0:
            near = [gamma for gamma in gammas[max(best - 1, 0) : best + 2] if gamma != gammas[best]]
            return min(near, key=num_timed.__getitem__, default=gammas[best])
        if self._in_vain > TUNING.check_every:
            return gammas[best]
        hopeful = {
            gamma: wait
            for gamma, wait in zip(gammas, waits, strict=True)
            if not num_timed[gamma] and (1 - _TRIAL_MARGIN) * wait < waits[best]
        }
        return min(hopeful, key=hopeful.__getitem__, default=gammas[best])

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        if math.isfinite(record.seconds):
            self._in_vain = 0
            # All requests have an equal share of a step's seconds, so one is enough.
            if (step := self._pending.pop(record.step, None)) is not None:
                self._num_timed[_shape_of(step), record.gamma] += 1
                seconds = record.seconds * (len(step.members) or step.batch_size)
                unit_s = seconds / _relative_s(record.gamma, step.batch_size)
                self._seconds.at(step, step.batch_size).add(record.gamma, unit_s)
        if record.gamma:
            self._rates.observe(record.request_id, min(record.gamma, self._candidates[-1]), record.num_accepted)

    def _expected_s(self, context: StepContext, batch_size: int) -> list[float]:
        """Expected seconds of a step by candidate; relative ones before any is known."""
        curve = self._seconds.at(context, batch_size)
        unit_s = [max(curve.at(gamma), SHORTEST_S) for gamma in self._candidates]
        return [unit * _relative_s(gamma, batch_size) for unit, gamma in zip(unit_s, self._candidates, strict=True)]

    def step_seconds(self, batch_sizes: Sequence[int]) -> dict[int, dict[int, float]]:
        """Expected seconds at the newest step's context length, by batch size, by gamma; empty before any is known."""
        if self._last is None or not self._num_timed:
            return {}
        known = [size for size in batch_sizes if self._seconds.at(self._last, size).weight]
        rows = {size: self._expected_s(self._last, size) for size in known}
        return {size: dict(zip(self._candidates, row, strict=True)) for size, row in rows.items()}


def _shape_of(step: StepContext) -> tuple[int, int]:
    """The batch size and the context length in powers of two."""
    return round(math.log2(step.batch_size)), length_scale(step.num_target_slots)


def _relative_s(gamma: int, batch_size: int) -> float:
    """Before any measurement: a drafted token costs a tenth of a step, and each token of the batch a little."""
    return 1 + 0.1 * gamma + 0.02 * batch_size * (1 + gamma)
