"""P(every token drafted so far and the next one are accepted), learned online from what the draft itself knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from spec_stack.controller.base import DraftSignals, StepRecord

_SMALLEST = 1e-3
_LEAST_CONFIDENCE = 1e-4
_HISTORY_WEIGHT = 0.2
_TYPICAL_ACCEPTANCE = 0.75


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


class OnlineAcceptance:
    """Learned online, from a start that suits greedy drafts of the target's family: works with no training at all.

    The probability is a product: of each drafted token's own chance, given what the draft says of it and of the one
    before, and the next one's, given the last's. So a step teaches accepted + 1 independent lessons. (Learned as one
    number, a step of 16 tokens whose first is wrong would count 16 times, and a few such steps end drafting for good.)

    Parameters
    ----------
    trust, forgetting : float
        As in `OnlineLogistic`.

    Notes
    -----
    The start weights were fitted on texts of one real pair (experiments/LOG.md, "The controller on a real pair"). They
    weigh as much as `trust` examples, so they decide the first steps of a new generator and little after. A doubted
    token is seldom alone: behind one that was right against a chance of a half the next is right 7 times in 10, behind
    a sure one 49 in 50.
    """

    # log confidence, log of the rest, entropy, confidence and entropy of the token before, recent acceptance, bias
    _OWN_START = (2.0, -3.3, 0.2, -0.1, -0.1, 0.5, 5.0)
    # nothing drafted, logit of the last token's chance, recent acceptance, bias
    _NEXT_START = (0.5, 0.8, 0.5, 2.0)

    def __init__(self, trust: float = 20.0, forgetting: float = 0.999) -> None:
        self._own = OnlineLogistic(self._OWN_START, trust, forgetting)
        self._next = OnlineLogistic(self._NEXT_START, trust, forgetting)
        # First tokens: how many were accepted, and how many were expected to be, over the start and lately.
        self._num_accepted = self._num_expected = 0.0
        self._num_judged = 0
        # Moving average of the share of judged tokens that were accepted (those after the first wrong one are not).
        self._recent = _TYPICAL_ACCEPTANCE
        self.begin()

    def begin(self) -> None:
        self._drafted_all_right, self._last, self._num_drafted = 1.0, 1.0, 0

    @property
    def _calibration(self) -> float:
        """Return what first tokens have brought of what was expected of them, 1 at most.

        A draft that is sure and wrong is let go by this within a few steps, long before the weights have learned it;
        the longer they have learned, the less it counts.
        """
        weight = 1.0 + self._num_judged / 2
        return min((weight + self._num_accepted) / (weight + self._num_expected), 1.0)

    def extend(self, signals: DraftSignals) -> tuple[float, float]:
        for index in range(self._num_drafted, len(signals)):
            self._last = sigmoid(self._own.logit(_own_features(signals, index, self._recent)))
            self._drafted_all_right *= self._last
        self._num_drafted = len(signals)
        so_far = self._drafted_all_right * self._calibration
        return so_far, so_far * self._chance_behind(self._last)

    def _chance_behind(self, last: float | None) -> float:
        return sigmoid(self._next.logit(_next_features(last, self._recent)))

    def learn(self, record: StepRecord) -> None:
        """From each token up to the first wrong one; those after it tell nothing of their own."""
        signals = record.signals
        if signals and not record.is_prefill:
            self._num_judged += 1
            self._num_accepted = 0.95 * self._num_accepted + (record.num_accepted > 0)
            self._num_expected = 0.95 * self._num_expected + self._chance_behind(None)
        last: float | None = None
        for index in range(min(record.num_accepted + 1, len(signals))):
            accepted = index < record.num_accepted
            features = _own_features(signals, index, self._recent)
            self._next.learn(_next_features(last, self._recent), accepted)
            last = sigmoid(self._own.logit(features))
            self._own.learn(features, accepted)
        self._recent += _HISTORY_WEIGHT * (_rate_of(record) - self._recent)


def _rate_of(record: StepRecord) -> float:
    """Share of the judged tokens that were accepted; where nothing was drafted what is known fades to the typical."""
    if record.num_drafted == 0:
        return _TYPICAL_ACCEPTANCE
    accepted = record.num_drafted_accepted
    return accepted / (accepted + (accepted < record.num_drafted))


# Both are centred and scaled to about one: the diagonal Gaussian learns best then.
def _own_features(signals: DraftSignals, index: int, recent: float) -> tuple[float, ...]:
    """(7,) of the index-th drafted token. The first has none before it: that counts as sure."""
    confidence, entropy = signals.confidence[index], signals.entropy[index]
    confidence_before, entropy_before = (
        (signals.confidence[index - 1], signals.entropy[index - 1]) if index else (1.0, 0.0)
    )
    return (
        math.log(max(confidence, _LEAST_CONFIDENCE)) + 0.3,
        (math.log(max(1 - confidence, _LEAST_CONFIDENCE)) + 4) / 3,
        entropy - 0.7,
        3 * (confidence_before - 0.9),
        entropy_before - 0.5,
        2 * recent - 1.5,
        1.0,
    )


def _next_features(last: float | None, recent: float) -> tuple[float, ...]:
    """(4,) of the token after one that is right with the chance `last`; None where nothing was drafted before it."""
    return (float(last is None), 0.0 if last is None else logit(last) / 2 - 1.5, 2 * recent - 1.5, 1.0)
