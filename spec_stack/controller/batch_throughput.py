"""`throughput` for servers: one gamma for a whole batch, fixed before it drafts, by tokens per second.

A server's step has fixed shapes: all requests of a batch draft equally far, and how far is settled before the first
token. So there are no signals to stop by, and what is known is how each request has gone and what each gamma has cost
at this batch size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from spec_stack.config import DecodeConfig
from spec_stack.controller.acceptance import logit, sigmoid
from spec_stack.controller.base import Policy, StepContext, StepRecord, check_gammas

_TYPICAL_ACCEPTANCE = 0.7
# Odds of an acceptance seen as 0 or 1 would be infinite.
_MIN_ACCEPTANCE = 0.02
# Requests whose acceptance is remembered; the longest silent one is forgotten first.
_MAX_REQUESTS = 4096
# Steps whose result may be outstanding. SGLang's overlap leaves one.
_MAX_PENDING = 8
# A gamma is tried until `trials` steps had known seconds, but this many times `trials` at most: a step that follows a
# prefill leaves no seconds, and where all do, trying must come to an end all the same.
_TRIES_PER_TRIAL = 4

Costs = dict[int, "_GammaCost"]


class _GammaCost:
    """Seconds of a step with one gamma at one batch size; a stall counts as a step of twice the usual time."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.num_seen = 0
        self.seconds = math.inf
        self.last_step = 0

    def observe(self, seconds: float, step: int, weight: float, trials: int) -> None:
        if self.num_seen < trials:
            # The first steps of a shape are slow for reasons of their own, so the quickest of them starts the average.
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += weight * (min(seconds, 2 * self.seconds) - self.seconds)
        self.num_seen += 1
        self.last_step = step


@dataclass
class BatchThroughput(Policy):
    """The gamma with most expected tokens per second, over the requests of the last step.

    The chance that a drafted token is accepted, given those before it, is learned by place over all requests, and
    each request's own acceptance raises or lowers it (in log odds). Costs are kept per batch size, in powers of two.

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
    Records of one step carry the same step number and each its request's share of the seconds; a record whose seconds
    are not finite teaches about acceptance alone.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    trials: int = 2
    probe_every: int = 32
    _by_place: list[float] = field(init=False, repr=False)
    _acceptance: OrderedDict[str, float] = field(init=False, repr=False, default_factory=OrderedDict)
    _typical: float = field(init=False, repr=False, default=_TYPICAL_ACCEPTANCE)
    _costs: dict[tuple[str, int], Costs] = field(init=False, repr=False, default_factory=dict)
    _batch: list[str] = field(init=False, repr=False, default_factory=list)
    _step: int = field(init=False, repr=False, default=-1)
    # A server may tell how a step went while the next one runs already, at another batch size.
    _buckets: OrderedDict[int, int] = field(init=False, repr=False, default_factory=OrderedDict)
    _num_chosen: int = field(init=False, repr=False, default=0)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gammas("gammas", self.gammas)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if self.trials < 1:
            raise ValueError(f"trials must be 1 or more, got {self.trials}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")
        self._by_place = [_TYPICAL_ACCEPTANCE] * max(self.gammas)

    def choose(self, context: StepContext) -> int:
        """Try what was never tried at this batch size, else take the best, now and then a neighbour of it."""
        bucket = context.batch_size.bit_length()
        self._remember(context.step, bucket)
        costs = self._costs_at(context.precision, bucket)
        usable = [gamma for gamma in self.gammas if gamma <= context.max_gamma]
        if not usable:
            return 0
        untried = self._untried(usable, costs)
        if untried is not None:
            costs[untried].num_tried += 1
            return untried
        best = self._best(usable, costs)
        if best is None:
            # No step had known seconds, as under a load of short replies: the usual gamma then.
            return max((gamma for gamma in usable if gamma <= DecodeConfig.gamma), default=usable[0])
        self._num_chosen += 1
        if self._num_chosen % self.probe_every == 0:
            return _stale_neighbour(best, usable, costs)
        return best

    def _remember(self, step: int, bucket: int) -> None:
        self._buckets.pop(step, None)
        self._buckets[step] = bucket
        if len(self._buckets) > _MAX_PENDING:
            self._buckets.popitem(last=False)

    def _untried(self, usable: list[int], costs: Costs) -> int | None:
        """The first gamma that is still to be tried, or None."""
        max_tries = _TRIES_PER_TRIAL * self.trials
        for gamma in usable:
            if costs[gamma].num_seen < self.trials and costs[gamma].num_tried < max_tries:
                return gamma
        return None

    def _best(self, usable: list[int], costs: Costs) -> int | None:
        """The gamma with most expected tokens per second, or None where no gamma's seconds are known."""
        known = [gamma for gamma in usable if costs[gamma].num_seen]
        expected = self._expected_accepted()
        return max(known, key=lambda gamma: (1 + expected[gamma]) / max(costs[gamma].seconds, 1e-9), default=None)

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        is_new_step = record.step != self._step
        if is_new_step:
            self._step, self._batch = record.step, []
        self._batch.append(record.request_id)
        if record.gamma:
            self._learn_acceptance(record)
        bucket = self._buckets.get(record.step)
        is_timed = math.isfinite(record.seconds)
        if is_new_step and is_timed and bucket is not None and record.gamma in self.gammas:
            cost = self._costs_at(record.precision, bucket)[record.gamma]
            cost.observe(record.seconds, record.step, self.weight, self.trials)

    def _learn_acceptance(self, record: StepRecord) -> None:
        for place in range(min(record.num_accepted + 1, record.gamma, len(self._by_place))):
            accepted = float(place < record.num_accepted)
            self._by_place[place] += 0.5 * self.weight * (accepted - self._by_place[place])
        rate = record.num_accepted / (record.num_accepted + (record.num_accepted < record.gamma))
        before = self._acceptance.pop(record.request_id, self._typical)
        self._acceptance[record.request_id] = before + self.weight * (rate - before)
        self._typical += 0.1 * self.weight * (rate - self._typical)
        if len(self._acceptance) > _MAX_REQUESTS:
            self._acceptance.popitem(last=False)

    def _expected_accepted(self) -> list[float]:
        """(max(gammas) + 1,): accepted tokens of an average request, for every gamma from 0 on."""
        rates = [self._acceptance.get(request_id, self._typical) for request_id in self._batch] or [self._typical]
        places = [_odds(chance) - _odds(self._typical) for chance in self._by_place]
        expected = [0.0] * (len(places) + 1)
        for rate in rates:
            own, reached, total = _odds(rate), 1.0, 0.0
            for place, odds in enumerate(places):
                reached *= sigmoid(odds + own)
                total += reached
                expected[place + 1] += total / len(rates)
        return expected

    def _costs_at(self, precision: str, bucket: int) -> Costs:
        return self._costs.setdefault((precision, bucket), {gamma: _GammaCost() for gamma in sorted(self.gammas)})


def _stale_neighbour(best: int, usable: list[int], costs: Costs) -> int:
    """Of the gammas beside the best one, that whose seconds were measured longest ago."""
    at = usable.index(best)
    neighbours = usable[max(at - 1, 0) : at] + usable[at + 1 : at + 2]
    return min(neighbours, key=lambda gamma: costs[gamma].last_step, default=best)


def _odds(acceptance: float) -> float:
    return logit(acceptance, _MIN_ACCEPTANCE)
