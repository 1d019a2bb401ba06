"""One gamma for a whole batch, settled before it drafts: the one under which its requests end soonest.

A server's step has fixed shapes: all requests of a batch draft equally far, and how far is settled before the first
token. So no token's own signals can end a proposal; what is known is how each request's earlier steps went.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from spec_stack.config import DecodeConfig
from spec_stack.controller.base import BatchMember, Policy, StepContext, StepRecord, check_gammas
from spec_stack.controller.batch_cost import Floats, StepSeconds

# Requests that are remembered; the longest silent one is forgotten first.
_MAX_REQUESTS = 4096
# Log seconds: what is as sure as this is not tried again for its own sake.
_SURE = 0.15
# One step in so many goes to the neighbour of the best that is least sure, since first steps may have misled.
_PROBE_EVERY = 64
# The share of the wait that another gamma must save: a change costs, and what is expected is never quite so.
_WORTH_A_CHANGE = 0.03
# Steps in a row that left no seconds, as all do under a load of short replies, before trying comes to an end.
_MOST_IN_VAIN = 20
Known = TypeVar("Known")


class PerRequest(Generic[Known]):
    """Holds what is known of each request, by its id; new entries are made as requests come."""

    def __init__(self, make: Callable[[], Known]) -> None:
        self._make = make
        self._known: OrderedDict[str, Known] = OrderedDict()

    def of(self, request_id: str) -> Known:
        """Return what is known of a request, to be read or changed."""
        if request_id not in self._known:
            self._known[request_id] = self._make()
            if len(self._known) > _MAX_REQUESTS:
                self._known.popitem(last=False)
        self._known.move_to_end(request_id)
        return self._known[request_id]


class LastMembers:
    """Who was in the newest step, for a context that names nobody."""

    def __init__(self) -> None:
        self._step = -1
        self._request_ids: list[str] = []

    @property
    def members(self) -> list[BatchMember]:
        return [BatchMember(request_id) for request_id in self._request_ids]

    def note(self, record: StepRecord) -> None:
        if record.step != self._step:
            self._step, self._request_ids = record.step, []
        self._request_ids.append(record.request_id)


@dataclass
class BatchRule(Policy):
    """argmin over gamma of the sum over requests of a step's seconds over the tokens expected of it.

    A subclass says what is expected. Seconds are measured; a gamma that may well be the best, for all that is known of
    its seconds, is tried. The last one holds where another saves too little.

    Parameters
    ----------
    gammas : tuple of int
        The candidates, 0 for plain decoding among them if it may be used.
    weight : float
        Of the last step in a request's acceptance, in (0, 1].
    profile : mapping, optional
        Seconds of a step by batch size, by gamma, as /server_info of an earlier launch shows them: what is expected of
        steps before any has run.

    Notes
    -----
    Every answer is finite, so a request's seconds a token are what counts, and their sum is the harmonic mean of the
    requests' speeds: speeding up an easy one buys little while a hard one stays and sets the pace.

    Records of one step carry the same step number and each its request's share of the seconds; a record whose seconds
    are not finite teaches about acceptance alone.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    profile: Mapping[Any, Mapping[Any, float]] | None = None
    _seconds: StepSeconds = field(init=False, repr=False)
    _num_chosen: int = field(init=False, repr=False, default=0)
    # The newest that was chosen as the best, or as hardly worse.
    _usual: int = field(init=False, repr=False, default=-1)
    _num_considered: int = field(init=False, repr=False, default=-1)
    _in_vain: int = field(init=False, repr=False, default=0)
    # The newest step's.
    _num_slots: int = field(init=False, repr=False, default=0)
    _last: LastMembers = field(init=False, repr=False, default_factory=LastMembers)

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        self._candidates = sorted(self.gammas)
        self._seconds = StepSeconds(self._candidates, _checked_profile(self.profile))

    @abstractmethod
    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Floats:
        """Accepted tokens that are expected of every request of the step, for every gamma from 0 on
        (num_members, max(gammas) + 1).

        Called once per step, whatever is chosen then. members: the step's, or the last step's where the context names
        none; there may be none at all, and one row for anybody stands for them.
        """

    @abstractmethod
    def learn(self, record: StepRecord) -> None:
        """Take in how a request's step went, in tokens."""

    def choose(self, context: StepContext) -> int:
        """The best for all that is known, or a gamma that is as likely to be, for all that is not."""
        members = context.members or self._last.members
        num_slots = self._num_slots = context.num_target_slots
        self._seconds.begin(context.step, context.batch_size, len(context.members) or context.batch_size, num_slots)
        expected = self.expected_accepted(context, members)
        usable = [at for at, gamma in enumerate(self._candidates) if gamma <= context.max_gamma]
        if not usable:
            return 0
        gammas = [self._candidates[at] for at in usable]
        seconds = self._seconds.expected(context.batch_size, num_slots)[usable]
        waits = seconds * (1 / (1 + expected[:, gammas])).sum(axis=0)
        best = int(waits.argmin())
        if self._usual in gammas and (1 - _WORTH_A_CHANGE) * waits[gammas.index(self._usual)] < waits[best]:
            best = gammas.index(self._usual)
        self._usual = gammas[best]
        self._in_vain += 1
        if self._in_vain > _MOST_IN_VAIN and not self._seconds.num_seen:
            # No step had known seconds: the default gamma then.
            return max((gamma for gamma in gammas if gamma <= DecodeConfig.gamma), default=gammas[0])
        self._num_chosen += 1
        is_probe = self._num_chosen % _PROBE_EVERY == 0
        if self._seconds.num_taken_in == self._num_considered and not is_probe:
            # Nothing new is known of any gamma's seconds.
            return gammas[best]
        self._num_considered = self._seconds.num_taken_in
        doubt = self._seconds.doubt(context.batch_size, usable[best], num_slots)[usable]
        tried = self._to_try(doubt, np.log(waits / waits[best]), is_probe)
        return gammas[best if tried is None else tried]

    def _to_try(self, doubt: Floats, worse: Floats, is_probe: bool) -> int | None:
        """Which candidate is to be tried instead of the best, by how unsure its seconds are, and by how much worse it
        looks, both as logarithms; None for none."""
        best = int(worse.argmin())
        if is_probe:
            near = [at for at in (best - 1, best + 1) if 0 <= at < len(doubt)]
            return max(near, key=lambda at: float(doubt[at]), default=None)
        doubt = np.where((doubt > _SURE) & (worse < doubt), doubt, 0.0)
        return int(doubt.argmax()) if doubt.any() and self._in_vain <= _MOST_IN_VAIN else None

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        self._last.note(record)
        if math.isfinite(record.seconds):
            self._in_vain = 0
            self._seconds.observe(record.step, record.gamma, record.seconds)
        self.learn(record)

    def step_seconds(self, batch_sizes: Sequence[int]) -> dict[int, dict[int, float]]:
        """What is known by now of contexts as long as the newest step's, as `profile` takes it; empty before any step's
        seconds are."""
        if not self._seconds.num_seen:
            return {}
        rows = {size: self._seconds.expected(size, self._num_slots).tolist() for size in batch_sizes}
        return {size: dict(zip(self._candidates, row, strict=True)) for size, row in rows.items()}


def _checked_profile(profile: Mapping[Any, Mapping[Any, float]] | None) -> dict[int, dict[int, float]]:
    """With numbers for keys, which JSON has as strings."""
    try:
        found = {int(size): {int(g): float(s) for g, s in row.items()} for size, row in (profile or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"profile must map batch sizes to gammas to seconds: {error}") from error
    if not all(size > 0 and 0 < s < math.inf for size, row in found.items() for s in row.values()):
        raise ValueError("profile must hold batch sizes of 1 or more, and seconds over 0")
    return found
