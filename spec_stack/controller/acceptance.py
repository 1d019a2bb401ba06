"""P(all tokens drafted so far are accepted, and the next one): SpecKV's small network, recalibrated online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.predictor import Network, read_network
from spec_stack.controller.tuning import TUNING

FILE = Path(__file__).parents[1] / "assets" / "survival.json"
SURVIVAL_FEATURES = ("log_confidence", "log_rest", "entropy", "confidence_before", "entropy_before", "is_of_the_next")
_LEAST_CONFIDENCE = 1e-4
_LEAST_CURVATURE = 0.01


def sigmoid(value: float) -> float:
    """The logistic function, safe for any finite value."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


class OnlineLogistic:
    """Logistic regression, one example at a time: a diagonal Gaussian over the weights, updated by each example.

    `start` holds the prior weights, the bias last; they count as `TUNING.trust` examples.
    """

    def __init__(self, start: Sequence[float]) -> None:
        self.weights = list(start)
        self._precision = [TUNING.trust] * len(self.weights)

    def logit(self, features: Sequence[float]) -> float:
        return sum([weight * value for weight, value in zip(self.weights, features, strict=True)])

    def learn(self, features: Sequence[float], outcome: bool) -> None:
        """One step, divided by the total uncertainty so that correlated features do not overshoot."""
        expected = sigmoid(self.logit(features))
        curvature = max(expected * (1 - expected), _LEAST_CURVATURE)
        gain = 1.0
        for index, value in enumerate(features):
            decayed = self._precision[index] * TUNING.forgetting + TUNING.trust * (1 - TUNING.forgetting)
            self._precision[index] = decayed
            gain += curvature * value * value / decayed
        step = (float(outcome) - expected) / gain
        for index, value in enumerate(features):
            self.weights[index] += step * value / self._precision[index]
            self._precision[index] += curvature * value * value


def survival_features(signals: DraftSignals, index: int) -> tuple[list[float], list[float]]:
    """SURVIVAL_FEATURES (6,) of the index-th drafted token and its predecessor; the first token's predecessor counts as
    sure.
    """
    confidence = signals.confidence[index]
    before = (signals.confidence[index - 1], signals.entropy[index - 1]) if index else (1.0, 0.0)
    said = [
        math.log(max(confidence, _LEAST_CONFIDENCE)),
        math.log(max(1 - confidence, _LEAST_CONFIDENCE)),
        signals.entropy[index],
        *before,
    ]
    return [*said, 0.0], [*said, 1.0]


@lru_cache(maxsize=1)
def shipped_network() -> Network:
    """The network that ships with the package. Raises ValueError where the file is damaged."""
    return read_network(FILE, SURVIVAL_FEATURES)


class AcceptanceEstimator:
    """Predicts acceptance after each drafted token; recalibrated online.

    A proposal survives with the product of its tokens' chances. Each chance is the network's logit, scaled and shifted
    by two regressions over all requests (other pairs, sampling, quantised weights), and shifted by this request's
    outcomes.
    """

    def __init__(self) -> None:
        self._network = shipped_network()
        self._own, self._next = OnlineLogistic((2.0, 0.0)), OnlineLogistic((2.0, 0.0))
        self._begin_request()
        self.reset()

    def _begin_request(self) -> None:
        self._shift, self._evidence = 0.0, TUNING.prior_weight

    def reset(self) -> None:
        self._survival, self._with_next = 1.0, 1.0
        # The network's two logits per drafted token of the newest proposal.
        self._signals: DraftSignals | None = None
        self._logits: list[tuple[float, float]] = []

    def update(self, signals: DraftSignals) -> tuple[float, float]:
        """P(all tokens drafted since `reset` are accepted), and P(all of them and the next one are)."""
        self._signals = signals
        for index in range(len(self._logits), len(signals)):
            own, behind = self._outputs(signals, index)
            self._logits.append((own, behind))
            self._survival *= sigmoid(self._own.logit((own / 2, 1.0)) + self._shift)
            self._with_next = self._survival * sigmoid(self._next.logit((behind / 2, 1.0)) + self._shift)
        return self._survival, self._with_next

    def _outputs(self, signals: DraftSignals, index: int) -> tuple[float, float]:
        own, behind = self._network.outputs(survival_features(signals, index)).tolist()
        return own, behind

    def learn(self, record: StepRecord) -> None:
        """Learn from each token up to the first rejected one; later tokens carry no information of their own."""
        if record.is_prefill:
            self._begin_request()
            return
        signals, accepted = record.signals, record.num_drafted_accepted
        known = self._logits if signals is self._signals else []
        for index in range(min(accepted + 1, len(signals))):
            own, behind = known[index] if index < len(known) else self._outputs(signals, index)
            features, is_right = (own / 2, 1.0), index < accepted
            expected = sigmoid(self._own.logit(features) + self._shift)
            self._evidence += max(expected * (1 - expected), _LEAST_CURVATURE)
            self._shift += (is_right - expected) / self._evidence
            self._own.learn(features, is_right)
            if is_right and index + 1 < len(signals):
                self._next.learn((behind / 2, 1.0), index + 1 < accepted)
