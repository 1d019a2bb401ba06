"""P(every token drafted so far and the next one are accepted), from what the draft itself knows.

One probability serves both decisions of a step: before the first token it says whether to draft at all, after
each token whether to go on. Predicting it directly, instead of multiplying a chance per token, keeps it calibrated
although acceptance comes in runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from spec_stack.records import DraftSignals, StepRecord

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


class AcceptanceModel(Protocol):
    """Maps FEATURES to a probability. `learn` may do nothing."""

    def predict(self, features: Sequence[float]) -> float: ...

    def learn(self, features: Sequence[float], accepted: bool) -> None: ...


class History:
    """How a request's, or a server's, last steps went. Mutated by `observe`."""

    def __init__(self) -> None:
        self.recent_acceptance = 0.7
        self.accepted_all = 0.0
        self.accepted_none = 0.0

    def observe(self, record: StepRecord) -> None:
        """Take in a step that drafted something; others say nothing about acceptance."""
        if record.gamma == 0:
            return
        rejected = record.num_accepted < record.gamma
        rate = record.num_accepted / (record.num_accepted + rejected)
        self.recent_acceptance += _HISTORY_WEIGHT * (rate - self.recent_acceptance)
        self.accepted_all = float(not rejected)
        self.accepted_none = float(record.num_accepted == 0)


def features(signals: DraftSignals, num_drafted: int, history: History) -> tuple[float, ...]:
    """The features after num_drafted tokens, which may be fewer than `signals` hold (then later ones are not read)."""
    past = (history.recent_acceptance, history.accepted_all, history.accepted_none)
    if num_drafted == 0:
        return (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *past)
    log_joint = 0.0
    smallest = 1.0
    confidence = 1.0
    for index in range(num_drafted):
        confidence = min(max(signals.confidence[index], _SMALLEST), 1 - _SMALLEST)
        log_joint += math.log(confidence)
        if confidence < smallest:
            smallest = confidence
    return (
        0.0,
        math.log(num_drafted),
        log_joint,
        math.log(confidence / (1 - confidence)),
        math.log(smallest / (1 - smallest)),
        min(signals.entropy[num_drafted - 1], 8.0),
        *past,
    )


def examples(record: StepRecord, history: History) -> Iterator[tuple[tuple[float, ...], bool]]:
    """What one step teaches: after each drafted token but the last, and before the first, was the next one accepted?"""
    for num_drafted in range(record.gamma):
        yield features(record.signals, num_drafted, history), record.num_accepted > num_drafted


def sigmoid(value: float) -> float:
    """The logistic function, safe for any finite value."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


class OnlineLogistic:
    """Logistic regression learned step by step: a diagonal Gaussian over the weights, corrected by each example.

    The start is a guess that suits greedy drafts of the target's own family; it is trusted like `trust`
    examples and forgotten at rate `forgetting` per example, so a few hundred tokens replace it.
    """

    START = (0.8, 0.3, 0.7, 0.25, 0.25, 0.0, 1.0, 0.2, -0.2)
    BIAS = 0.0

    def __init__(self, trust: float = 10.0, forgetting: float = 0.999) -> None:
        if trust <= 0:
            raise ValueError(f"trust must be over 0, got {trust}")
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting}; 1 never forgets")
        self._weights = [*self.START, self.BIAS]
        self._precision = [trust] * (len(FEATURES) + 1)
        self._trust = trust
        self._forgetting = forgetting

    def predict(self, features: Sequence[float]) -> float:
        return sigmoid(self._logit(features))

    def _logit(self, features: Sequence[float]) -> float:
        total = self._weights[-1]
        for weight, value in zip(self._weights, features, strict=False):
            total += weight * value
        return total

    def learn(self, features: Sequence[float], accepted: bool) -> None:
        """One corrected step, divided by the whole uncertainty so that correlated features do not overshoot."""
        expected = self.predict(features)
        curvature = max(expected * (1 - expected), 0.01)
        keep = self._forgetting
        values = (*features, 1.0)
        gain = 1.0
        for index, value in enumerate(values):
            decayed = self._precision[index] * keep + self._trust * (1 - keep)
            self._precision[index] = decayed
            gain += curvature * value * value / decayed
        step = (float(accepted) - expected) / gain
        for index, value in enumerate(values):
            if value:
                self._weights[index] += step * value / self._precision[index]
                self._precision[index] += curvature * value * value


class Recalibrated:
    """A trained model whose logit is shifted and scaled online, so that it may be used on another pair or task."""

    def __init__(self, model: AcceptanceModel, trust: float = 20.0) -> None:
        self._model = model
        self._scale, self._shift = 1.0, 0.0
        self._scale_precision = self._shift_precision = trust

    def _inner(self, features: Sequence[float]) -> float:
        inner = min(max(self._model.predict(features), 1e-4), 1 - 1e-4)
        return math.log(inner / (1 - inner))

    def predict(self, features: Sequence[float]) -> float:
        return sigmoid(self._scale * self._inner(features) + self._shift)

    def learn(self, features: Sequence[float], accepted: bool) -> None:
        inner = self._inner(features)
        expected = sigmoid(self._scale * inner + self._shift)
        curvature = max(expected * (1 - expected), 0.01)
        gain = 1 + curvature * (inner * inner / self._scale_precision + 1 / self._shift_precision)
        step = (float(accepted) - expected) / gain
        self._scale += step * inner / self._scale_precision
        self._shift += step / self._shift_precision
        self._scale_precision += curvature * inner * inner
        self._shift_precision += curvature
