"""One gamma for a whole batch, settled before it drafts: the one under which its requests end soonest.

A server's step has fixed shapes: all requests of a batch draft equally far, and how far is settled before the first
token. So no token's own signals can end a proposal; what is known is how each request's earlier steps went.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec_stack.config import DecodeConfig
from spec_stack.controller.base import BatchMember, Policy, StepContext, StepRecord, check_gammas
from spec_stack.controller.batch_cost import StepSeconds, stale_neighbour

Floats = NDArray[np.float64]
# Requests that are remembered; the longest silent one is forgotten first.
_MAX_REQUESTS = 4096
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
        self.members: list[BatchMember] = []

    def note(self, record: StepRecord) -> None:
        if record.step != self._step:
            self._step, self.members = record.step, []
        self.members.append(BatchMember(record.request_id))


@dataclass
class BatchRule(Policy):
    """argmin over gamma of the sum over requests of a step's seconds over the tokens expected of it.

    A subclass says what is expected. Costs are measured, per batch size; a gamma that was never tried there is.

    Parameters
    ----------
    gammas : tuple of int
        The candidates, 0 for plain decoding among them if it may be used.
    weight : float
        Of the last step in a request's acceptance and in a gamma's seconds, in (0, 1].
    trials : int
        Steps each gamma is tried for at a new batch size.
    probe_every : int
        One step in this many measures a neighbour of the best gamma again, since times change with load and length.

    Notes
    -----
    Every answer is finite, so a request's seconds a token are what counts, and their sum is the harmonic mean of the
    requests' speeds: speeding up an easy one buys little while a hard one stays and sets the pace.

    Records of one step carry the same step number and each its request's share of the seconds; a record whose seconds
    are not finite teaches about acceptance alone.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    trials: int = 2
    probe_every: int = 32
    _seconds: StepSeconds = field(init=False, repr=False)
    _num_chosen: int = field(init=False, repr=False, default=0)
    _last: LastMembers = field(init=False, repr=False, default_factory=LastMembers)

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if self.trials < 1:
            raise ValueError(f"trials must be 1 or more, got {self.trials}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")
        self._seconds = StepSeconds(self.gammas, self.weight, self.trials)
        self._candidates = sorted(self.gammas)

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
        """Try what was never tried at this batch size, else take the best, now and then a neighbour of it."""
        costs = self._seconds.begin(context.step, context.precision, context.batch_size)
        expected = self.expected_accepted(context, context.members or self._last.members)
        usable = [gamma for gamma in self._candidates if gamma <= context.max_gamma]
        if not usable:
            return 0
        untried = self._seconds.to_try(usable, costs)
        if untried is not None:
            return untried
        known = [gamma for gamma in usable if costs[gamma].num_seen]
        if not known:
            # No step had known seconds, as under a load of short replies: the usual gamma then.
            return max((gamma for gamma in usable if gamma <= DecodeConfig.gamma), default=usable[0])
        seconds = np.array([costs[gamma].seconds for gamma in known])
        best = known[int((seconds * (1 / (1 + expected[:, known])).sum(axis=0)).argmin())]
        self._num_chosen += 1
        return stale_neighbour(best, usable, costs) if self._num_chosen % self.probe_every == 0 else best

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        self._last.note(record)
        if math.isfinite(record.seconds):
            self._seconds.observe(record.step, record.precision, record.gamma, record.seconds)
        self.learn(record)
