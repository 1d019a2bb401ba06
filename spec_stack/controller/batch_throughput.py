"""`throughput` for servers: what each request is expected to have accepted is learned while it runs, from its own last
steps and what the draft knew of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_stack.controller.acceptance import logit
from spec_stack.controller.base import BatchMember, StepContext, StepRecord
from spec_stack.controller.batch_cost import MAX_PENDING, Floats
from spec_stack.controller.batch_rule import BatchRule, PerRequest

_TYPICAL_ACCEPTANCE = 0.7
# Odds of an acceptance seen as 0 or 1 would be infinite.
_MIN_ACCEPTANCE = 0.02
# Steps that are learned from together, which costs hardly more than to learn from one.
_LOT = 4


# acceptance by place and request, upcoming confidence (of the first token, of later ones), last confidence (likewise),
# surprise, bias
_START = (1.0, 0.8, 0.2, 0.1, 0.1, 0.0, 0.0)
# Which of them go with what is known of a request (the columns of `_Asked.rows`), for the first token and later ones.
_OF_ROW = np.array([(0, 0), (1, 2), (3, 4), (5, 5)])


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
        """Return the probability of features (…, n): (…)."""
        return _sigmoid(features @ self.weights)

    def learn(self, features: Floats, outcomes: Floats) -> None:
        """features (examples, n), outcomes (examples,) of 0 and 1."""
        expected = self.probability(features)
        curvature = np.maximum(expected * (1 - expected), 0.01)
        keep = self._forgetting ** len(outcomes)
        self._precision = keep * self._precision + (1 - keep) * self._prior
        self._precision += (features * curvature[:, None]).T @ features
        self.weights = self.weights + np.linalg.solve(self._precision, features.T @ (outcomes - expected))


@dataclass(slots=True)
class _Request:
    """Holds what is known of a request before its next step.

    own: log odds of its acceptance, a moving average; None before any. upcoming: of the first token of the step after
    its newest record, log odds of the draft's confidence, halved, less 1. confidence: likewise of the newest record's
    mean confidence. 0 where unknown. surprise: 0.5 where all of the newest proposal was accepted, -0.5 where none was.
    """

    acceptance: float | None = None
    own: float | None = None
    upcoming: float = 0.0
    confidence: float = 0.0
    surprise: float = 0.0


@dataclass(slots=True)
class _Asked:
    """The knowledge by which a step was chosen: places (gamma,), log odds over the typical; rows (members, 4), own,
    upcoming, confidence, surprise; whose each row is."""

    places: Floats
    rows: Floats
    at: dict[str, int]


@dataclass
class BatchThroughput(BatchRule):
    """The gamma under which the step's requests end soonest; their tokens are expected by an online model.

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
    _asked: OrderedDict[int, _Asked] = field(init=False, repr=False, default_factory=OrderedDict)
    # What was known of a request (step's places, row) and how many of its proposal were accepted, of how many judged.
    _num_asked: int = field(init=False, repr=False, default=0)
    _lessons: list[tuple[Floats, Floats, int, int]] = field(init=False, repr=False, default_factory=list)

    name = "throughput"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._by_place = [_TYPICAL_ACCEPTANCE] * max(self.gammas)

    def expected_accepted(self, context: StepContext, members: Sequence[BatchMember]) -> Floats:
        self._num_asked += 1
        if self._lessons and not self._num_asked % _LOT:
            self._learn_lessons()
        if not members:
            members = (BatchMember("", max(self.gammas)),)
        asked = self._what_is_known(members)
        self._asked.pop(context.step, None)
        self._asked[context.step] = asked
        if len(self._asked) > MAX_PENDING:
            self._asked.popitem(last=False)
        reached = _sigmoid(self._log_odds(asked.places, asked.rows)).cumprod(axis=1)
        for row, member in enumerate(members):
            if member.max_gamma < reached.shape[1]:
                reached[row, member.max_gamma :] = 0.0
        expected = np.zeros((len(members), reached.shape[1] + 1))
        reached.cumsum(axis=1, out=expected[:, 1:])
        return expected

    def _what_is_known(self, members: Sequence[BatchMember]) -> _Asked:
        typical = _odds(self._typical)
        rows = []
        for member in members:
            known = self._requests.of(member.request_id)
            rows.append((typical if known.own is None else known.own, known.upcoming, known.confidence, known.surprise))
        places = np.array([_odds(chance) - typical for chance in self._by_place])
        return _Asked(places, np.array(rows), {member.request_id: at for at, member in enumerate(members)})

    def _log_odds(self, places: Floats, rows: Floats) -> Floats:
        """(members, places): the model over the features beside `_START`, without writing them out."""
        weights = self._model.weights
        first_and_later = rows @ weights[_OF_ROW] + weights[-1]
        is_later = np.minimum(np.arange(len(places)), 1)
        found: Floats = first_and_later[:, is_later] + weights[0] * places
        return found

    def _learn_lessons(self) -> None:
        """All at once: every judged place of every request is an example, its features in the order of `_START`."""
        judged = np.array([count for *_, count in self._lessons])
        owner = np.repeat(np.arange(len(judged)), judged)
        place = np.arange(len(owner)) - np.repeat(judged.cumsum() - judged, judged)
        rows = np.array([row for _, row, *_ in self._lessons])[owner]
        is_first = (place == 0).astype(np.float64)
        features = np.empty((len(owner), len(_START)))
        features[:, 0] = rows[:, 0] + np.array([places for places, *_ in self._lessons])[owner, place]
        features[:, 1], features[:, 2] = is_first * rows[:, 1], (1 - is_first) * rows[:, 1]
        features[:, 3], features[:, 4] = is_first * rows[:, 2], (1 - is_first) * rows[:, 2]
        features[:, 5], features[:, 6] = rows[:, 3], 1.0
        accepted = np.array([num_accepted for _, _, num_accepted, _ in self._lessons])[owner]
        self._lessons.clear()
        self._model.learn(features, (place < accepted).astype(np.float64))

    def learn(self, record: StepRecord) -> None:
        known = self._requests.of(record.request_id)
        known.upcoming = 0.0 if record.upcoming is None else logit(record.upcoming.confidence[0]) / 2 - 1
        if not record.gamma:
            return
        if record.signals:
            known.confidence = logit(record.signals.mean_confidence) / 2 - 1
        num_accepted = record.num_accepted
        judged = min(num_accepted + 1, record.gamma, len(self._by_place))
        pace = 0.5 * self.weight
        for place in range(judged):
            self._by_place[place] += pace * ((place < num_accepted) - self._by_place[place])
        asked = self._asked.get(record.step)
        at = None if asked is None else asked.at.get(record.request_id)
        if asked is not None and at is not None:
            self._lessons.append((asked.places, asked.rows[at], num_accepted, judged))
        rate = num_accepted / (num_accepted + (num_accepted < record.gamma))
        before = self._typical if known.acceptance is None else known.acceptance
        known.acceptance = before + self.weight * (rate - before)
        known.own = _odds(known.acceptance)
        known.surprise = 0.5 * ((num_accepted == record.gamma) - (num_accepted == 0))
        self._typical += 0.1 * self.weight * (rate - self._typical)


def _sigmoid(log_odds: Floats) -> Floats:
    """By tanh, which overflows nowhere."""
    found: Floats = 0.5 + 0.5 * np.tanh(0.5 * log_odds)
    return found


def _odds(acceptance: float) -> float:
    return logit(acceptance, _MIN_ACCEPTANCE)
