"""P(every token drafted so far and the next one are accepted), from what the draft itself knows.

One probability serves both decisions of a step: before the first token it says whether to draft at all, after
each token whether to go on. Two models give it: one that is learned online from nothing, and a trained one
(`predictors.TokenPredictor`) behind `Recalibrated`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from spec_stack.controller.base import DraftSignals, StepRecord

FEATURES = (
    "nothing_drafted",
    "log_num_drafted",
    "log_joint_confidence",
    "logit_last_confidence",
    "logit_min_confidence",
    "last_entropy",
    "recent_acceptance",
    "last_step_accepted_all",
    "last_step_accepted_none",
)
_SMALLEST = 1e-3
_HISTORY_WEIGHT = 0.2
_TYPICAL_ACCEPTANCE = 0.75


class History:
    """How the last steps went. Mutated by `observe`."""

    def __init__(self) -> None:
        self.recent_acceptance = _TYPICAL_ACCEPTANCE
        self.accepted_all = 0.5
        self.accepted_none = 0.0

    def observe(self, record: StepRecord) -> None:
        """Take in a step. One that drafted nothing makes what is known older, so it fades towards the typical."""
        if record.gamma == 0:
            self.recent_acceptance += _HISTORY_WEIGHT * (_TYPICAL_ACCEPTANCE - self.recent_acceptance)
            self.accepted_all += _HISTORY_WEIGHT * (0.5 - self.accepted_all)
            self.accepted_none *= 0.5
            return
        rejected = record.num_accepted < record.gamma
        rate = record.num_accepted / (record.num_accepted + rejected)
        self.recent_acceptance += _HISTORY_WEIGHT * (rate - self.recent_acceptance)
        self.accepted_all = float(not rejected)
        self.accepted_none = float(record.num_accepted == 0)


class AcceptanceModel(Protocol):
    """What `throughput` asks, in the order of drafting; joint(…, 0, …) begins a step and is always asked."""

    def joint(self, signals: DraftSignals, num_drafted: int, history: History) -> float:
        """P(the first num_drafted tokens and the next one are all accepted), from signals[:num_drafted]."""
        ...

    def learn(self, record: StepRecord, history: History) -> None:
        """Told how a step went, with the history it was decided on. May do nothing."""
        ...


def sigmoid(value: float) -> float:
    """The logistic function, safe for any finite value."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


def _logit(confidence: float) -> float:
    confidence = min(max(confidence, _SMALLEST), 1 - _SMALLEST)
    return math.log(confidence / (1 - confidence))


class OnlineLogistic:
    """Logistic regression one example at a time: a diagonal Gaussian over the weights, corrected by each example.

    start: the weights before any example, the last for the bias. trust: the examples the start is worth.
    forgetting: per example, in (0, 1]; 1 never forgets. Raises ValueError for values outside.
    """

    def __init__(self, start: Sequence[float], trust: float = 10.0, forgetting: float = 0.999) -> None:
        if trust <= 0:
            raise ValueError(f"trust must be over 0, got {trust}")
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting}; 1 never forgets")
        self.weights = list(start)
        self._precision = [trust] * len(self.weights)
        self._trust = trust
        self._forgetting = forgetting

    def logit(self, features: Sequence[float], optimism: float = 0.0) -> float:
        """The mean logit, raised by `optimism` standard errors."""
        total = 0.0
        for weight, value in zip(self.weights, features, strict=True):
            total += weight * value
        if optimism:
            total += optimism * math.sqrt(
                sum(value * value / precision for value, precision in zip(features, self._precision, strict=True))
            )
        return total

    def learn(self, features: Sequence[float], outcome: bool) -> None:
        """One corrected step, divided by the whole uncertainty so that correlated features do not overshoot."""
        expected = sigmoid(self.logit(features))
        curvature = max(expected * (1 - expected), 0.01)
        gain = 1.0
        for index, value in enumerate(features):
            decayed = self._precision[index] * self._forgetting + self._trust * (1 - self._forgetting)
            self._precision[index] = decayed
            gain += curvature * value * value / decayed
        step = (float(outcome) - expected) / gain
        for index, value in enumerate(features):
            self.weights[index] += step * value / self._precision[index]
            self._precision[index] += curvature * value * value


class OnlineAcceptance:
    """Learned online, from a start that suits greedy drafts of the target's family: works with no training at all.

    The probability is a product: of each drafted token's own chance, given its own signals, and the next one's, given
    the last's. So a step teaches accepted + 1 independent lessons. (Learned as one number, a step of 16 tokens whose
    first is wrong would count 16 times, and a few such steps end drafting for good.) The next token's chance is taken
    `optimism` standard errors high, because a policy that stops early never sees what it missed.
    """

    _OWN = (1.6, 0.0, 0.4, 0.5, 0.0, 0.0, 0.5)
    _NEXT = (0.2, 0.4, 0.0, 0.4, 1.0, 0.3, -0.3, 1.0)

    def __init__(self, trust: float = 10.0, forgetting: float = 0.999, optimism: float = 0.5) -> None:
        """Options as in OnlineLogistic. Raises ValueError for a negative optimism."""
        if optimism < 0:
            raise ValueError(f"optimism must be 0 or more, got {optimism}")
        self._own = OnlineLogistic(self._OWN, trust, forgetting)
        self._next = OnlineLogistic(self._NEXT, trust, forgetting)
        self._optimism = optimism
        self._product = 1.0
        self._num_multiplied = 0

    def joint(self, signals: DraftSignals, num_drafted: int, history: History) -> float:
        if num_drafted == 0:
            self._product, self._num_multiplied = 1.0, 0
        for index in range(self._num_multiplied, num_drafted):
            self._product *= sigmoid(self._own.logit(_own_features(signals, index, history)))
        self._num_multiplied = num_drafted
        following = self._next.logit(_next_features(signals, num_drafted, history), self._optimism)
        return self._product * sigmoid(following)

    def learn(self, record: StepRecord, history: History) -> None:
        """From each token up to the first wrong one; those after it tell nothing of their own."""
        for index in range(min(record.num_accepted + 1, len(record.signals))):
            accepted = index < record.num_accepted
            self._own.learn(_own_features(record.signals, index, history), accepted)
            self._next.learn(_next_features(record.signals, index, history), accepted)


# Both are centred and scaled to about one: the diagonal Gaussian learns best then.
def _own_features(signals: DraftSignals, index: int, history: History) -> tuple[float, ...]:
    return (
        _logit(signals.confidence[index]) / 2,
        signals.entropy[index] / 2 - 0.5,
        math.log1p(index) / 2,
        2 * history.recent_acceptance - 1.5,
        history.accepted_all - 0.5,
        history.accepted_none,
        1.0,
    )


def _next_features(signals: DraftSignals, num_drafted: int, history: History) -> tuple[float, ...]:
    past = (2 * history.recent_acceptance - 1.5, history.accepted_all - 0.5, history.accepted_none, 1.0)
    if num_drafted == 0:
        return (1.0, 0.0, 0.0, 0.0, *past)
    confidence, entropy = signals.confidence[num_drafted - 1], signals.entropy[num_drafted - 1]
    return (0.0, _logit(confidence) / 2 - 1, entropy / 2 - 0.5, math.log1p(num_drafted) / 2, *past)


def features(signals: DraftSignals, num_drafted: int, history: History) -> tuple[float, ...]:
    """FEATURES after num_drafted tokens, for trained models; later entries of `signals` are not read."""
    past = (history.recent_acceptance, history.accepted_all, history.accepted_none)
    if num_drafted == 0:
        return (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *past)
    drafted = signals.confidence[:num_drafted]
    log_joint = sum(math.log(max(confidence, _SMALLEST)) for confidence in drafted)
    return (
        0.0,
        math.log(num_drafted),
        max(log_joint, -20.0),
        _logit(drafted[-1]),
        _logit(min(drafted)),
        min(signals.entropy[num_drafted - 1], 8.0),
        *past,
    )


def examples(record: StepRecord, history: History) -> Iterator[tuple[tuple[float, ...], bool]]:
    """What one step teaches a trained model: before each drafted token, was it and all before it accepted?"""
    for num_drafted in range(len(record.signals)):
        yield features(record.signals, num_drafted, history), record.num_accepted > num_drafted


class ProbabilityModel(Protocol):
    """Maps FEATURES to a probability."""

    def predict(self, features: Sequence[float]) -> float: ...


class Recalibrated:
    """A trained model whose logit is scaled and shifted online, so that it may be used on another pair or task."""

    def __init__(self, model: ProbabilityModel, trust: float = 20.0) -> None:
        self._model = model
        self._line = OnlineLogistic((1.0, 0.0), trust, forgetting=1.0)

    def joint(self, signals: DraftSignals, num_drafted: int, history: History) -> float:
        return sigmoid(self._line.logit(self._inner(features(signals, num_drafted, history))))

    def learn(self, record: StepRecord, history: History) -> None:
        """From one token a step, in turn: a step's outcomes are one event, not gamma of them."""
        if not record.signals:
            return
        chosen = record.step % len(record.signals)
        inner = self._inner(features(record.signals, chosen, history))
        self._line.learn(inner, record.num_accepted > chosen)

    def _inner(self, values: Sequence[float]) -> tuple[float, float]:
        probability = min(max(self._model.predict(values), 1e-4), 1 - 1e-4)
        return math.log(probability / (1 - probability)), 1.0
