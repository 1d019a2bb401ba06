"""`throughput` for servers: what each request is expected to have accepted is learned while it runs, from its own last
steps and what the draft knew of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spec_stack.controller.acceptance import logit
from spec_stack.controller.base import BatchMember, StepContext, StepRecord
from spec_stack.controller.batch_cost import MAX_PENDING
from spec_stack.controller.batch_rule import BatchRule, PerRequest

Floats = NDArray[np.float64]
_TYPICAL_ACCEPTANCE = 0.7
# Odds of an acceptance seen as 0 or 1 would be infinite.
_MIN_ACCEPTANCE = 0.02


@dataclass
class _Request:
    """What is known of a request before its next step.

    acceptance: moving average. upcoming: of the first token of the step after its newest record, log odds of the
    draft's confidence. confidence: of the newest record's tokens, mean log odds. Both None where unknown. surprise: 0.5
    where all of the newest proposal was accepted, -0.5 where none was.
    """

    acceptance: float | None = None
    upcoming: float | None = None
    confidence: float | None = None
    surprise: float = 0.0


# acceptance by place and request, upcoming confidence (of the first token, of later ones), last confidence (likewise),
# surprise, bias
_START = (1.0, 0.8, 0.2, 0.1, 0.1, 0.0, 0.0)


class BatchLogistic:
    """Logistic regression with all of its uncertainty (a Gaussian over the weights), many examples at once.

    Parameters
    ----------
    start : sequence of float
        The weights before any example.
    trust : float
        The examples that the start is worth.
    forgetting : float
        Per example, in (0, 1].

    Notes
    -----
    One Newton step per lot of examples: with precision A, features x, outcomes y and predictions p, A grows by
    Σ p (1 - p) x xᵀ and the weights move by A⁻¹ Σ (y - p) x, so correlated features do not overshoot.
    """

    def __init__(self, start: Sequence[float], trust: float = 10.0, forgetting: float = 0.999) -> None:
        self.weights: Floats = np.array(start, dtype=np.float64)
        self._prior = trust * np.eye(len(start))
        self._precision = self._prior.copy()
        self._forgetting = forgetting

    def probability(self, features: Floats) -> Floats:
        """Of features (…, n): (…)."""
        return np.asarray(1 / (1 + np.exp(-np.clip(features @ self.weights, -30, 30))), dtype=np.float64)

    def learn(self, features: Floats, outcomes: Floats) -> None:
        """features (examples, n), outcomes (examples,) of 0 and 1."""
        expected = self.probability(features)
        curvature = np.maximum(expected * (1 - expected), 0.01)
        keep = self._forgetting ** len(outcomes)
        self._precision = keep * self._precision + (1 - keep) * self._prior
        self._precision += (features * curvature[:, None]).T @ features
        self.weights = self.weights + np.linalg.solve(self._precision, features.T @ (outcomes - expected))


@dataclass
class BatchThroughput(BatchRule):
    """The gamma with most expected tokens per second; a request's tokens are expected by an online model.

    The chance that a drafted token is accepted, given those before it, is learned by place over all requests; a
    request's own acceptance raises or lowers it, and so does the draft's confidence: in the request's last proposal
    and, above all, in the token that its next step begins with, which a server's draft has made by then. How much each
    counts is learned from what was known when a step was chosen, so at the lag that the server has. Where no signals
    are known acceptance alone counts.
    """

    _by_place: list[float] = field(init=False, repr=False)
    _requests: PerRequest[_Request] = field(init=False, repr=False, default_factory=lambda: PerRequest(_Request))
    _typical: float = field(init=False, repr=False, default=_TYPICAL_ACCEPTANCE)
    _model: BatchLogistic = field(init=False, repr=False, default_factory=lambda: BatchLogistic(_START))
    # By step, what was known of each request when it was chosen: (places, features).
    _asked: OrderedDict[int, dict[str, Floats]] = field(init=False, repr=False, default_factory=OrderedDict)
    _lessons: list[tuple[Floats, Floats]] = field(init=False, repr=False, default_factory=list)

    name = "throughput"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._by_place = [_TYPICAL_ACCEPTANCE] * max(self.gammas)

    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Sequence[float]:
        if self._lessons:
            self._model.learn(*(np.concatenate(parts) for parts in zip(*self._lessons, strict=True)))
            self._lessons.clear()
        if not members:
            members = (BatchMember("", max(self.gammas)),)
        features = self._features(members)
        self._asked.pop(context.step, None)
        self._asked[context.step] = {member.request_id: row for member, row in zip(members, features, strict=True)}
        if len(self._asked) > MAX_PENDING:
            self._asked.popitem(last=False)
        reached = np.cumprod(self._model.probability(features), axis=1)
        for row, member in zip(reached, members, strict=True):
            row[member.max_gamma :] = 0.0
        return [0.0, *np.cumsum(reached.mean(axis=0)).tolist()]

    def _features(self, members: Sequence[BatchMember]) -> Floats:
        """(requests, places, features), by the names beside `_START`."""
        known = [self._requests.of(member.request_id) for member in members]
        typical = _odds(self._typical)
        places = np.array([_odds(chance) - typical for chance in self._by_place])
        own = np.array([typical if each.acceptance is None else _odds(each.acceptance) for each in known])
        upcoming = np.array([0.0 if each.upcoming is None else each.upcoming / 2 - 1 for each in known])
        confidence = np.array([0.0 if each.confidence is None else each.confidence / 2 - 1 for each in known])
        features = np.zeros((len(known), len(places), len(_START)))
        features[:, :, 0] = own[:, None] + places
        features[:, :1, 1] = upcoming[:, None]
        features[:, 1:, 2] = upcoming[:, None]
        features[:, :1, 3] = confidence[:, None]
        features[:, 1:, 4] = confidence[:, None]
        features[:, :, 5] = np.array([each.surprise for each in known])[:, None]
        features[:, :, 6] = 1.0
        return features

    def learn(self, record: StepRecord) -> None:
        known = self._requests.of(record.request_id)
        known.upcoming = None if record.upcoming is None else logit(record.upcoming.confidence[0])
        if not record.gamma:
            return
        if record.signals:
            known.confidence = sum(map(logit, record.signals.confidence)) / len(record.signals)
        judged = min(record.num_accepted + 1, record.gamma, len(self._by_place))
        outcomes = [float(place < record.num_accepted) for place in range(judged)]
        for place, accepted in enumerate(outcomes):
            self._by_place[place] += 0.5 * self.weight * (accepted - self._by_place[place])
        features = self._asked.get(record.step, {}).get(record.request_id)
        if features is not None:
            self._lessons.append((features[:judged], np.array(outcomes)))
        rate = record.num_accepted / (record.num_accepted + (record.num_accepted < record.gamma))
        before = self._typical if known.acceptance is None else known.acceptance
        known.acceptance = before + self.weight * (rate - before)
        known.surprise = 0.5 * ((record.num_accepted == record.gamma) - (record.num_accepted == 0))
        self._typical += 0.1 * self.weight * (rate - self._typical)


def _odds(acceptance: float) -> float:
    return logit(acceptance, _MIN_ACCEPTANCE)
