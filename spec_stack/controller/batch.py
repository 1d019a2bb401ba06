"""One gamma for a whole batch, chosen before it drafts: the one that minimises the requests' summed time per token.

A server's step has fixed shapes, so the requests' earlier steps and the draft's confidence in the first token decide.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_stack.config import DecodeConfig
from spec_stack.controller.acceptance import OnlineLogistic, logit
from spec_stack.controller.base import BatchMember, Policy, StepContext, StepRecord, check_gammas
from spec_stack.controller.step_cost import TOLERANCE, length_scale

Floats = NDArray[np.float64]
# Requests that are remembered, and steps whose result may be outstanding.
_MAX_REQUESTS, _MAX_PENDING = 4096, 8
_TYPICAL_ACCEPTANCE = 0.7
# Share of the wait that another gamma must save: a change has a cost, and estimates have errors.
_WORTH_A_CHANGE = 0.03
# An unmeasured gamma is tried where its expected wait is within this factor of the best.
_WORTH_A_TRY = 0.2
# One step in so many tries the neighbour of the best gamma with the oldest measurement.
_PROBE_EVERY = 64
# Consecutive steps without seconds (a load of short replies) after which trying ends.
_MOST_IN_VAIN = 20


@dataclass
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

    Unmeasured cells scale the nearest measured size and length. profile: known seconds by batch size, by gamma.
    """

    def __init__(self, gammas: Sequence[int], profile: Mapping[int, Mapping[int, float]]) -> None:
        self._gammas = list(gammas)
        self._rows: dict[_Row, dict[int, _Cell]] = {}
        self._has_run: set[tuple[int, int]] = set()
        self.num_seen = 0
        for size, row in profile.items():
            known = {gamma: _Cell(seconds, num_seen=2) for gamma, seconds in row.items() if gamma in self._gammas}
            self._rows[_row_of(size, 0)] = known

    def observe(self, gamma: int, batch_size: int, num_slots: float, seconds: float) -> None:
        key = _row_of(batch_size, num_slots)
        if (key[0], gamma) not in self._has_run:
            # The first step of a size includes warm-up.
            self._has_run.add((key[0], gamma))
        elif gamma in self._gammas:
            self.num_seen += 1
            row = self._rows.setdefault(key, {})
            if gamma in row:
                row[gamma].add(seconds, self.num_seen)
            else:
                row[gamma] = _Cell(seconds, at=self.num_seen)

    def measured(self, batch_size: int, num_slots: float) -> Mapping[int, _Cell]:
        """The measured cells at this size and length, by gamma."""
        return self._rows.get(_row_of(batch_size, num_slots), {})

    def expected(self, batch_size: int, num_slots: float = 0) -> Floats:
        """Expected seconds of a step of this size and length, by candidate."""
        key = _row_of(batch_size, num_slots)
        row = self._rows.get(key, {})
        if len(row) == len(self._gammas):
            return np.array([row[gamma].seconds for gamma in self._gammas])
        near = sorted(self._rows, key=lambda each: abs(each[0] - key[0]) + abs(each[1] - key[1]))
        return np.array([self._expected(gamma, key, near) for gamma in self._gammas])

    def _expected(self, gamma: int, key: _Row, near: Sequence[_Row]) -> float:
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


@dataclass(slots=True)
class _Request:
    """Moving average of a request's acceptance, as log odds, and `upcoming`: the draft's confidence in the next step's
    first token, halved and less 1; 0 where unknown.
    """

    acceptance: float
    upcoming: float = 0.0


@dataclass
class _Pending:
    """The inputs of a step's choice: its shape, how many requests share its seconds, what was known of each of them."""

    batch_size: int
    num_slots: float
    num_requests: int
    known: dict[str, tuple[float, float]]


@dataclass
class BatchThroughput(Policy):
    """argmin over gamma of the sum over requests of a step's seconds over its expected tokens.

    The acceptance of the first and of each later token is learned from a request's acceptance and from the draft's
    confidence in the first token, at the server's lag. Seconds are measured; a gamma that may be the best is tried. The
    last gamma stays where another saves too little.

    Parameters
    ----------
    gammas : tuple of int
        The candidates; include 0 to allow plain decoding.
    weight : float
        Of the last step in a request's acceptance, in (0, 1].
    profile : mapping, optional
        Seconds of a step by batch size, by gamma, as /server_info of an earlier launch shows them: the expected seconds
        before any step has run.

    Notes
    -----
    Every reply is finite, so seconds per token count, and their sum is the harmonic mean of the requests' speeds: the
    slowest request sets the pace.

    Records of one step carry the same step number and each an equal share of the seconds. A record whose seconds are
    not finite updates acceptance alone.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    profile: Mapping[Any, Mapping[Any, float]] | None = None
    _seconds: StepSeconds = field(init=False, repr=False)
    _requests: OrderedDict[str, _Request] = field(init=False, repr=False, default_factory=OrderedDict)
    _pending: OrderedDict[int, _Pending] = field(init=False, repr=False, default_factory=OrderedDict)
    _typical: float = field(init=False, repr=False, default=_TYPICAL_ACCEPTANCE)
    # P(the token at each place of a proposal is accepted, given all before it).
    _by_place: list[float] = field(init=False, repr=False)
    # Over the log odds of a request's acceptance, shifted by the place's over the typical one's; `upcoming`; and the
    # bias.
    _first: OnlineLogistic = field(init=False, repr=False, default_factory=lambda: OnlineLogistic((1.0, 0.8, 0.0)))
    _later: OnlineLogistic = field(init=False, repr=False, default_factory=lambda: OnlineLogistic((1.0, 0.2, 0.0)))
    # The newest gamma chosen as the best, or nearly so.
    _usual: int = field(init=False, repr=False, default=-1)
    _num_chosen: int = field(init=False, repr=False, default=0)
    _in_vain: int = field(init=False, repr=False, default=0)
    _num_slots: float = field(init=False, repr=False, default=0)
    # The newest record's step, and the requests of its records: for a context without members.
    _newest: int = field(init=False, repr=False, default=-1)
    _members: tuple[BatchMember, ...] = field(init=False, repr=False, default=())

    name = "throughput"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        self._candidates = sorted(self.gammas)
        self._by_place = [_TYPICAL_ACCEPTANCE] * self._candidates[-1]
        self._seconds = StepSeconds(self._candidates, _checked_profile(self.profile))

    def choose(self, context: StepContext) -> int:
        members = context.members or self._members
        self._num_slots = context.num_target_slots
        expected = self.expected_accepted(context, members)
        gammas = [gamma for gamma in self._candidates if gamma <= context.max_gamma]
        if not gammas:
            return 0
        seconds = self._seconds.expected(context.batch_size, self._num_slots)[: len(gammas)]
        waits = seconds * (1 / (1 + expected[:, gammas])).sum(axis=0)
        best = int(waits.argmin())
        if self._usual in gammas and (1 - _WORTH_A_CHANGE) * waits[gammas.index(self._usual)] < waits[best]:
            best = gammas.index(self._usual)
        self._usual = gammas[best]
        self._num_chosen += 1
        self._in_vain += 1
        if self._in_vain > _MOST_IN_VAIN and not self._seconds.num_seen:
            # No step had known seconds: the default gamma then.
            return max((gamma for gamma in gammas if gamma <= DecodeConfig.gamma), default=gammas[0])
        return self._to_try(context, gammas, waits, best)

    def _to_try(self, context: StepContext, gammas: Sequence[int], waits: Floats, best: int) -> int:
        """The best gamma, or now and then a candidate whose unknown seconds may make it better."""
        measured = self._seconds.measured(context.batch_size, self._num_slots)
        if self._num_chosen % _PROBE_EVERY == 0:
            near = [gamma for gamma in gammas[max(best - 1, 0) : best + 2] if gamma != gammas[best]]
            return min(near, key=lambda gamma: measured[gamma].at if gamma in measured else -1, default=gammas[best])
        if self._in_vain > _MOST_IN_VAIN:
            return gammas[best]
        hopeful = {
            gamma: wait
            for gamma, wait in zip(gammas, waits.tolist(), strict=True)
            if gamma not in measured and (1 - _WORTH_A_TRY) * wait < waits[best]
        }
        return min(hopeful, key=hopeful.__getitem__, default=gammas[best])

    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Floats:
        """Expected accepted tokens per request and gamma from 0 on, (num_members, max(gammas) + 1); one row without
        members.
        """
        members = members or (BatchMember("", self._candidates[-1]),)
        typical = _odds(self._typical)
        known = [self._requests.get(member.request_id) or _Request(typical) for member in members]
        features = np.array([(each.acceptance, each.upcoming, 1.0) for each in known])
        self._remember(context, members, features)
        places = np.array([_odds(chance) - typical for chance in self._by_place])
        log_odds = (features @ np.array(self._later.weights))[:, None] + self._later.weights[0] * places
        log_odds[:, :1] = (features @ np.array(self._first.weights))[:, None] + self._first.weights[0] * places[:1]
        expected = np.zeros((len(members), self._candidates[-1] + 1))
        _sigmoid(log_odds).cumprod(axis=1).cumsum(axis=1, out=expected[:, 1:])
        caps = np.array([member.max_gamma for member in members])
        most = np.minimum(np.arange(expected.shape[1]), caps[:, None])
        return np.take_along_axis(expected, most, axis=1)

    def _remember(self, context: StepContext, members: Sequence[BatchMember], features: Floats) -> None:
        known = {member.request_id: (row[0], row[1]) for member, row in zip(members, features.tolist(), strict=True)}
        num_requests = len(context.members) or context.batch_size
        self._pending.pop(context.step, None)
        self._pending[context.step] = _Pending(context.batch_size, context.num_target_slots, num_requests, known)
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        pending = self._pending.get(record.step)
        self._members = (*(self._members if record.step == self._newest else ()), BatchMember(record.request_id))
        self._newest = record.step
        if math.isfinite(record.seconds):
            self._in_vain = 0
            # All requests have an equal share of a step's seconds, so one is enough.
            if pending is not None and pending.num_requests:
                seconds, pending.num_requests = record.seconds * pending.num_requests, 0
                self._seconds.observe(record.gamma, pending.batch_size, pending.num_slots, seconds)
        known = {} if pending is None or not record.gamma else pending.known
        # One request in turn, so that learning costs the same at any batch size.
        if record.request_id in known and (record.step + len(self._members)) % len(known) == 0:
            self._learn_chances(record, known[record.request_id])
        self._note_request(record)

    def _learn_chances(self, record: StepRecord, known: tuple[float, float]) -> None:
        typical, (own, upcoming) = _odds(self._typical), known
        for place in range(min(record.num_accepted + 1, record.gamma, len(self._by_place))):
            features = own + _odds(self._by_place[place]) - typical, upcoming, 1.0
            (self._later if place else self._first).learn(features, place < record.num_accepted)

    def _note_request(self, record: StepRecord) -> None:
        known = self._requests.pop(record.request_id, None) or _Request(_odds(self._typical))
        self._requests[record.request_id] = known
        if len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)
        known.upcoming = 0.0 if record.upcoming is None else logit(record.upcoming.confidence[0]) / 2 - 1
        if record.gamma:
            for place in range(min(record.num_accepted + 1, record.gamma, len(self._by_place))):
                self._by_place[place] += 0.5 * self.weight * ((place < record.num_accepted) - self._by_place[place])
            rate = record.num_accepted / (record.num_accepted + (record.num_accepted < record.gamma))
            before = 1 / (1 + math.exp(-known.acceptance))
            known.acceptance = _odds(before + self.weight * (rate - before))
            self._typical += 0.1 * self.weight * (rate - self._typical)

    def step_seconds(self, batch_sizes: Sequence[int]) -> dict[int, dict[int, float]]:
        """Measured seconds at the newest step's context length, in the form of `profile`; empty before any."""
        if not self._seconds.num_seen:
            return {}
        rows = {size: self._seconds.expected(size, self._num_slots).tolist() for size in batch_sizes}
        return {size: dict(zip(self._candidates, row, strict=True)) for size, row in rows.items()}


def _sigmoid(log_odds: Floats) -> Floats:
    """By tanh, which does not overflow."""
    found: Floats = 0.5 + 0.5 * np.tanh(0.5 * log_odds)
    return found


def _odds(acceptance: float) -> float:
    """Log odds, clipped: those of 0 or 1 are infinite."""
    return logit(acceptance, least=0.02)


def _checked_profile(profile: Mapping[Any, Mapping[Any, float]] | None) -> dict[int, dict[int, float]]:
    """The profile with integer keys, which JSON holds as strings."""
    try:
        found = {int(size): {int(g): float(s) for g, s in row.items()} for size, row in (profile or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"profile must map batch sizes to gammas to seconds: {error}") from error
    if not all(size > 0 and 0 < s < math.inf for size, row in found.items() for s in row.values()):
        raise ValueError("profile must hold batch sizes of 1 or more, and seconds over 0")
    return found
