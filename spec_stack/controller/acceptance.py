"""The questions of `throughput` to a model of acceptance, and the regression by which models learn online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from spec_stack.controller.base import DraftSignals, StepRecord

_SMALLEST = 1e-3


class AcceptanceModel(Protocol):
    """Answers `throughput`: `begin` once per step, then `extend` once per drafted token, in order."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def extend(self, signals: DraftSignals) -> tuple[float, float]:
        """P(all tokens drafted so far are accepted), and P(all these and the next one are).

        signals: of the tokens drafted since `begin`. A call may bring more tokens than one, or none that is new.
        """
        ...

    def learn(self, record: StepRecord) -> None:
        """Told how a step went. May do nothing."""
        ...


def sigmoid(value: float) -> float:
    """The logistic function, safe for any finite value."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


def logit(probability: float, least: float = _SMALLEST) -> float:
    """The inverse of `sigmoid`, for a probability brought within [least, 1 - least] first."""
    probability = min(max(probability, least), 1 - least)
    return math.log(probability / (1 - probability))


class OnlineLogistic:
    """Logistic regression one example at a time: a diagonal Gaussian over the weights, corrected by each example.

    Parameters
    ----------
    start : sequence of float
        The weights before any example, the last for the bias.
    trust : float
        The examples that the start is worth.
    forgetting : float
        Per example, in (0, 1]; 1 never forgets.

    Raises
    ------
    ValueError
        For values outside.
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

    def logit(self, features: Sequence[float]) -> float:
        """The mean logit."""
        total = 0.0
        for weight, value in zip(self.weights, features, strict=True):
            total += weight * value
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
