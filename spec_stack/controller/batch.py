"""One gamma for a whole batch, chosen before it drafts: the one that minimises the requests' summed time per token.

A server's step has fixed shapes, so a gamma is chosen by what the requests' earlier steps accepted and took.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from spec_stack.config import DecodeConfig
from spec_stack.controller.base import BatchRequest, Policy, StepContext, StepRecord, check_gammas
from spec_stack.controller.step_cost import TOLERANCE, length_scale
from spec_stack.controller.tuning import TUNING

Floats = NDArray[np.float64]
# Requests that are remembered, and steps whose result may be outstanding.
_MAX_REQUESTS, _MAX_PENDING = 4096, 8
_TYPICAL_ACCEPTANCE = 0.7
# What a wrong and a right token count in averages of acceptance: the odds of 0 and 1 are 0 and infinite.
_WRONG, _RIGHT = 0.02, 0.98
# An unmeasured gamma is tried where its expected wait is within this factor of the best.
_WORTH_A_TRY = 0.2


@dataclass(slots=True)
class _Cell:
    """Moving average of a step's seconds for one gamma, batch size and context length, of `num_seen` steps, the last at
    `at`.
    """

    seconds: float
    num_seen: int = 1
    at: int = 0

    def add(self, seconds: float, at: int) -> None:
        self.num_seen, self.at = self.num_seen + 1, at
        bounded = min(seconds, TOLERANCE * self.seconds)
        self.seconds += max(1 / self.num_seen, 0.1) * (bounded - self.seconds)


_Row = tuple[int, int]


class StepSeconds:
    """Seconds of a server's steps by gamma, batch size and context length, in powers of two. Mutated by `observe`.

    Unmeasured cells scale the nearest measured size and length.
    """

    def __init__(self, gammas: Sequence[int]) -> None:
        self._gammas = list(gammas)
        self._rows: dict[_Row, dict[int, _Cell]] = {}
        self._has_run: set[tuple[int, int]] = set()
        self._expected: dict[_Row, Floats] = {}
        self.num_seen = 0

    def observe(self, gamma: int, batch_size: int, num_slots: float, seconds: float) -> None:
        key = _row_of(batch_size, num_slots)
        if (key[0], gamma) not in self._has_run:
            # The first step of a size includes warm-up.
            self._has_run.add((key[0], gamma))
        elif gamma in self._gammas:
            self.num_seen += 1
            row = self._rows.setdefault(key, {})
            is_new = gamma not in row
            if is_new:
                row[gamma] = _Cell(seconds, at=self.num_seen)
            else:
                row[gamma].add(seconds, self.num_seen)
            if is_new or self.num_seen % TUNING.check_every == 0:
                self._expected.clear()
            elif key in self._expected:
                self._expected[key][self._gammas.index(gamma)] = row[gamma].seconds

    def measured(self, batch_size: int, num_slots: float) -> Mapping[int, _Cell]:
        """The measured cells at this size and length, by gamma."""
        return self._rows.get(_row_of(batch_size, num_slots), {})

    def expected(self, batch_size: int, num_slots: float = 0) -> Floats:
        """Expected seconds of a step of this size and length, by candidate."""
        key = _row_of(batch_size, num_slots)
        if key not in self._expected:
            near = sorted(self._rows, key=lambda each: abs(each[0] - key[0]) + abs(each[1] - key[1]))
            self._expected[key] = np.array([self._estimate(gamma, key, near) for gamma in self._gammas])
        return self._expected[key]

    def _estimate(self, gamma: int, key: _Row, near: Sequence[_Row]) -> float:
        for each in near:
            if gamma in self._rows[each]:
                return self._rows[each][gamma].seconds * self._scale(gamma, key, each)
        if not near:
            return _prior(gamma, key)
        level = fmean(cell.seconds / _prior(other, near[0]) for other, cell in self._rows[near[0]].items())
        return level * _prior(gamma, key)

    def _scale(self, gamma: int, key: _Row, each: _Row) -> float:
        """Ratio of step seconds between two sizes and lengths, by the gammas measured at both."""
        row, other = self._rows.get(key, {}), self._rows[each]
        shared = [cell.seconds / other[known].seconds for known, cell in row.items() if known in other]
        return fmean(shared) if shared else _prior(gamma, key) / _prior(gamma, each)


def _row_of(batch_size: int, num_slots: float) -> _Row:
    return round(math.log2(max(batch_size, 1))), length_scale(num_slots)


def _prior(gamma: int, row: _Row) -> float:
    """Before any measurement: a drafted token costs a tenth of a step, and each token of the batch a little."""
    return 1 + 0.1 * gamma + 0.02 * (1 << row[0]) * (1 + gamma)


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


@dataclass(slots=True)
class _Pending:
    """The shape of a step without a result; num_requests is 0 once its seconds are known."""

    batch_size: int
    num_slots: float
    num_requests: int


@dataclass
class BatchThroughput(Policy):
    """argmin over gamma of the sum over requests of a step's seconds over its expected tokens.

    Seconds and acceptance are moving averages of what was measured. A gamma that may be the best is tried. The last
    gamma stays where another saves too little.

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
    _seconds: StepSeconds = field(init=False, repr=False)
    _rates: AcceptanceRates = field(init=False, repr=False)
    _pending: OrderedDict[int, _Pending] = field(init=False, repr=False, default_factory=OrderedDict)
    # The newest gamma chosen as the best, or nearly so.
    _usual: int = field(init=False, repr=False, default=-1)
    _num_chosen: int = field(init=False, repr=False, default=0)
    _in_vain: int = field(init=False, repr=False, default=0)
    _num_slots: float = field(init=False, repr=False, default=0)
    # The request of the newest record, for a context without members.
    _newest: BatchRequest = field(init=False, repr=False, default=BatchRequest(""))

    name = "throughput"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        self._candidates = sorted(self.gammas)
        self._rates = AcceptanceRates(self._candidates[-1], self.weight)
        self._seconds = StepSeconds(self._candidates)

    def choose(self, context: StepContext) -> int:
        self._num_slots = context.num_target_slots
        self._remember(context)
        gammas = [gamma for gamma in self._candidates if gamma <= context.max_gamma]
        if not gammas:
            return 0
        expected = self.expected_accepted_tokens(context.members or (self._newest,))
        seconds = self._seconds.expected(context.batch_size, self._num_slots)[: len(gammas)]
        waits: list[float] = (seconds * (1 / (1 + expected[:, gammas])).sum(axis=0)).tolist()
        best = waits.index(min(waits))
        if self._usual in gammas and waits[gammas.index(self._usual)] < TUNING.least_speedup * waits[best]:
            best = gammas.index(self._usual)
        self._usual = gammas[best]
        self._num_chosen += 1
        self._in_vain += 1
        if self._in_vain > TUNING.check_every and not self._seconds.num_seen:
            # No step had known seconds: the default gamma then.
            return max((gamma for gamma in gammas if gamma <= DecodeConfig.gamma), default=gammas[0])
        return self._to_try(context, gammas, waits, best)

    def expected_accepted_tokens(self, members: Sequence[BatchRequest]) -> Floats:
        """Expected accepted tokens per request and gamma from 0 on, (num_members, max(gammas) + 1)."""
        return self._rates.expected_accepted_tokens(members)

    def _to_try(self, context: StepContext, gammas: Sequence[int], waits: Sequence[float], best: int) -> int:
        """The best gamma, or now and then a candidate whose unknown seconds may make it better."""
        measured = self._seconds.measured(context.batch_size, self._num_slots)
        if self._num_chosen % (2 * TUNING.check_every) == 0:
            near = [gamma for gamma in gammas[max(best - 1, 0) : best + 2] if gamma != gammas[best]]
            return min(near, key=lambda gamma: measured[gamma].at if gamma in measured else -1, default=gammas[best])
        if self._in_vain > TUNING.check_every:
            return gammas[best]
        hopeful = {
            gamma: wait
            for gamma, wait in zip(gammas, waits, strict=True)
            if gamma not in measured and (1 - _WORTH_A_TRY) * wait < waits[best]
        }
        return min(hopeful, key=hopeful.__getitem__, default=gammas[best])

    def _remember(self, context: StepContext) -> None:
        num_requests = len(context.members) or context.batch_size
        self._pending[context.step] = _Pending(context.batch_size, context.num_target_slots, num_requests)
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        if math.isfinite(record.seconds):
            self._in_vain = 0
            step = self._pending.get(record.step)
            # All requests have an equal share of a step's seconds, so one is enough.
            if step is not None and step.num_requests:
                seconds, step.num_requests = record.seconds * step.num_requests, 0
                self._seconds.observe(record.gamma, step.batch_size, step.num_slots, seconds)
        if record.gamma:
            self._rates.observe(record.request_id, min(record.gamma, self._candidates[-1]), record.num_accepted)
        self._newest = BatchRequest(record.request_id)

    def step_seconds(self, batch_sizes: Sequence[int]) -> dict[int, dict[int, float]]:
        """Measured seconds at the newest step's context length, by batch size, by gamma; empty before any."""
        if not self._seconds.num_seen:
            return {}
        rows = {size: self._seconds.expected(size, self._num_slots).tolist() for size in batch_sizes}
        return {size: dict(zip(self._candidates, row, strict=True)) for size, row in rows.items()}
