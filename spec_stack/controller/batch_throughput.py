"""A policy for servers: one gamma for a whole batch, fixed before it drafts, by tokens per second.

A server's step has fixed shapes: all requests of a batch draft equally far, and how far is settled before the first
token. So there are no signals to stop by, and what is known is how each request has gone and what each gamma has cost
at this batch size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from spec_stack.config import MAX_GAMMA, DecodeConfig
from spec_stack.controller.acceptance import sigmoid
from spec_stack.controller.base import DraftSignals, StepContext, StepRecord

_TYPICAL_ACCEPTANCE = 0.7
_LEAST, _MOST = 0.02, 0.98
_MOST_REQUESTS = 4096
_MOST_PENDING = 8
_TRIES_PER_TRIAL = 4


@dataclass(frozen=True)
class BatchThroughputOptions:
    """gammas: the candidates, 0 for plain decoding among them if it may be used.

    weight: of the last step in a request's acceptance and in a gamma's seconds.
    trials: steps each gamma is tried for at a new batch size. probe_every: one step in this many measures a neighbour
    of the best gamma again, since times change with load and length.
    """

    gammas: tuple[int, ...] = (0, 1, 2, 4, 8)
    weight: float = 0.1
    trials: int = 2
    probe_every: int = 32

    def __post_init__(self) -> None:
        if not self.gammas or any(not 0 <= gamma <= MAX_GAMMA for gamma in self.gammas):
            raise ValueError(f"gammas must be one or more of 0 to {MAX_GAMMA}, got {self.gammas}")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if self.trials < 1:
            raise ValueError(f"trials must be 1 or more, got {self.trials}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")


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


def _logit(probability: float) -> float:
    probability = min(max(probability, _LEAST), _MOST)
    return math.log(probability / (1 - probability))


class BatchThroughput:
    """The gamma with most expected tokens per second, over the requests of the last step.

    The chance that a drafted token is accepted, given those before it, is learned by place over all requests, and
    each request's own acceptance raises or lowers it (in log odds).
    Records of one step carry the same step number and each its request's share of the seconds; a record whose seconds
    are not finite teaches about acceptance alone. Costs are kept per batch size, in powers of two.
    """

    name = "batch-throughput"

    def __init__(self, options: BatchThroughputOptions | None = None) -> None:
        self.options = options or BatchThroughputOptions()
        self._by_place = [_TYPICAL_ACCEPTANCE] * max(self.options.gammas)
        self._acceptance: OrderedDict[str, float] = OrderedDict()
        self._typical = _TYPICAL_ACCEPTANCE
        self._costs: dict[tuple[str, int], dict[int, _GammaCost]] = {}
        self._batch: list[str] = []
        self._step = -1
        # A server may tell how a step went while the next one runs already, at another batch size.
        self._buckets: OrderedDict[int, int] = OrderedDict()
        self._num_chosen = 0

    def choose(self, context: StepContext) -> int:
        bucket = context.batch_size.bit_length()
        self._buckets.pop(context.step, None)
        self._buckets[context.step] = bucket
        if len(self._buckets) > _MOST_PENDING:
            self._buckets.popitem(last=False)
        costs = self._of(context.precision, bucket)
        usable = [gamma for gamma in self.options.gammas if gamma <= context.max_gamma]
        if not usable:
            return 0
        # A step that follows a prefill leaves no seconds; where all do, trying must come to an end all the same.
        most_tries = _TRIES_PER_TRIAL * self.options.trials
        for gamma in usable:
            if costs[gamma].num_seen < self.options.trials and costs[gamma].num_tried < most_tries:
                costs[gamma].num_tried += 1
                return gamma
        known = [gamma for gamma in usable if costs[gamma].num_seen]
        if not known:
            return max((gamma for gamma in usable if gamma <= DecodeConfig.gamma), default=usable[0])
        expected = self._expected_accepted()
        best = max(known, key=lambda gamma: (1 + expected[gamma]) / max(costs[gamma].seconds, 1e-9))
        self._num_chosen += 1
        if self._num_chosen % self.options.probe_every == 0:
            at = usable.index(best)
            neighbours = usable[max(at - 1, 0) : at] + usable[at + 1 : at + 2]
            return min(neighbours, key=lambda gamma: costs[gamma].last_step, default=best)
        return best

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            return
        is_new_step = record.step != self._step
        if is_new_step:
            self._step, self._batch = record.step, []
        self._batch.append(record.request_id)
        if record.gamma:
            self._learn_acceptance(record)
        seconds = record.draft_s + record.verify_s + record.controller_s
        bucket = self._buckets.get(record.step)
        if is_new_step and bucket is not None and math.isfinite(seconds) and record.gamma in self.options.gammas:
            cost = self._of(record.precision, bucket)[record.gamma]
            cost.observe(seconds, record.step, self.options.weight, self.options.trials)

    def _learn_acceptance(self, record: StepRecord) -> None:
        for place in range(min(record.num_accepted + 1, record.gamma, len(self._by_place))):
            accepted = float(place < record.num_accepted)
            self._by_place[place] += 0.5 * self.options.weight * (accepted - self._by_place[place])
        rate = record.num_accepted / (record.num_accepted + (record.num_accepted < record.gamma))
        before = self._acceptance.pop(record.request_id, self._typical)
        self._acceptance[record.request_id] = before + self.options.weight * (rate - before)
        self._typical += 0.1 * self.options.weight * (rate - self._typical)
        if len(self._acceptance) > _MOST_REQUESTS:
            self._acceptance.popitem(last=False)

    def _expected_accepted(self) -> list[float]:
        """Accepted tokens of an average request, for every gamma up to the largest."""
        rates = [self._acceptance.get(request_id, self._typical) for request_id in self._batch] or [self._typical]
        places = [_logit(chance) - _logit(self._typical) for chance in self._by_place]
        expected = [0.0] * (len(places) + 1)
        for rate in rates:
            own, reached, total = _logit(rate), 1.0, 0.0
            for place, odds in enumerate(places):
                reached *= sigmoid(odds + own)
                total += reached
                expected[place + 1] += total / len(rates)
        return expected

    def _of(self, precision: str, bucket: int) -> dict[int, _GammaCost]:
        return self._costs.setdefault(
            (precision, bucket), {gamma: _GammaCost() for gamma in sorted(self.options.gammas)}
        )
