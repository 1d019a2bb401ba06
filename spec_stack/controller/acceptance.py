"""P(every token drafted so far and the next one are accepted), learned online from what the draft itself knows.

One probability serves both decisions of a step: before the first token it says whether to draft at all, after
each token whether to go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from spec_stack.controller.base import DraftSignals, StepRecord

_SMALLEST = 1e-3
_HISTORY_WEIGHT = 0.2
_TYPICAL_ACCEPTANCE = 0.75


class History:
    """How the last steps went. Mutated by `observe`.

    Attributes
    ----------
    recent_acceptance : float
        Moving average of the share of judged tokens that were accepted (those after the first wrong one are not
        judged).
    accepted_all, accepted_none : float
        Of the last step that drafted: 1.0 where every token was accepted, where none was.
    """

    def __init__(self) -> None:
        self.recent_acceptance = _TYPICAL_ACCEPTANCE
        self.accepted_all = 0.5
        self.accepted_none = 0.0

    def observe(self, record: StepRecord) -> None:
        """Take in a step. One that drafted nothing makes what is known older, so it fades towards the typical."""
        if record.num_drafted == 0:
            self.recent_acceptance += _HISTORY_WEIGHT * (_TYPICAL_ACCEPTANCE - self.recent_acceptance)
            self.accepted_all += _HISTORY_WEIGHT * (0.5 - self.accepted_all)
            self.accepted_none *= 0.5
            return
        accepted = record.num_drafted_accepted
        rejected = accepted < record.num_drafted
        rate = accepted / (accepted + rejected)
        self.recent_acceptance += _HISTORY_WEIGHT * (rate - self.recent_acceptance)
        self.accepted_all = float(not rejected)
        self.accepted_none = float(accepted == 0)


class AcceptanceModel(Protocol):
    """What `throughput` asks: `begin` once per step, then `extend` once per drafted token, in order."""

    def begin(self, history: History) -> float:
        """P(the first token is accepted), before anything is drafted."""
        ...

    def extend(self, signals: DraftSignals) -> float:
        """P(all tokens drafted so far and the next one are accepted).

        signals: of the tokens drafted since `begin`. One call may bring more tokens than one.
        """
        ...

    def learn(self, record: StepRecord, history: History) -> None:
        """Told how a step went, with the history it was decided on. May do nothing."""
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

    Parameters
    ----------
    trust, forgetting : float
        As in `OnlineLogistic`.
    optimism : float
        In standard errors, 0 or more.

    Notes
    -----
    The start weights, one per feature of `_own_features` and `_next_features`, are round figures chosen with the SpecKV
    authors' data and the first records of one small pair in view (experiments/LOG.md, "The controller"): a draft's
    confidence counts most, its entropy adds nothing to it, and what a fresh draft proposes is probably right. They
    weigh as much as `trust` examples, so they decide the first steps of a new generator and little after.
    """

    # logit of the confidence, entropy, place, recent acceptance, accepted all, accepted none, bias
    _OWN_START = (1.6, 0.0, 0.4, 0.5, 0.0, 0.0, 0.5)
    # nothing drafted, logit of the last confidence, last entropy, place, then as above
    _NEXT_START = (0.2, 0.4, 0.0, 0.4, 1.0, 0.3, -0.3, 1.0)

    def __init__(self, trust: float = 10.0, forgetting: float = 0.999, optimism: float = 0.5) -> None:
        if optimism < 0:
            raise ValueError(f"optimism must be 0 or more, got {optimism}")
        self._own = OnlineLogistic(self._OWN_START, trust, forgetting)
        self._next = OnlineLogistic(self._NEXT_START, trust, forgetting)
        self._optimism = optimism
        # First tokens: how many were accepted, and how many were expected to be, over the start and lately.
        self._num_accepted = self._num_expected = 0.0
        self._num_judged = 0
        self._first = 1.0
        self._history = History()
        self._drafted_all_right = 1.0
        self._num_drafted = 0

    def begin(self, history: History) -> float:
        self._history, self._drafted_all_right, self._num_drafted = history, 1.0, 0
        self._first = self._next_is_right(DraftSignals())
        return self._first * self._calibration

    @property
    def _calibration(self) -> float:
        """What first tokens have brought of what was expected of them, 1 at most.

        A draft that is sure and wrong is let go by this within a few steps, long before the weights have learned it;
        the longer they have learned, the less it counts.
        """
        weight = 1.0 + self._num_judged / 2
        return min((weight + self._num_accepted) / (weight + self._num_expected), 1.0)

    def extend(self, signals: DraftSignals) -> float:
        for index in range(self._num_drafted, len(signals)):
            self._drafted_all_right *= sigmoid(self._own.logit(_own_features(signals, index, self._history)))
        self._num_drafted = len(signals)
        return self._drafted_all_right * self._next_is_right(signals) * self._calibration

    def _next_is_right(self, signals: DraftSignals) -> float:
        return sigmoid(self._next.logit(_next_features(signals, len(signals), self._history), self._optimism))

    def learn(self, record: StepRecord, history: History) -> None:
        """From each token up to the first wrong one; those after it tell nothing of their own."""
        if record.signals and not record.is_prefill:
            self._num_judged += 1
            self._num_accepted = 0.95 * self._num_accepted + (record.num_accepted > 0)
            self._num_expected = 0.95 * self._num_expected + self._first
        for index in range(min(record.num_accepted + 1, len(record.signals))):
            accepted = index < record.num_accepted
            self._own.learn(_own_features(record.signals, index, history), accepted)
            self._next.learn(_next_features(record.signals, index, history), accepted)


# Both are centred and scaled to about one: the diagonal Gaussian learns best then.
def _own_features(signals: DraftSignals, index: int, history: History) -> tuple[float, ...]:
    """(7,) of the index-th drafted token."""
    return (
        logit(signals.confidence[index]) / 2,
        signals.entropy[index] / 2 - 0.5,
        math.log1p(index) / 2,
        2 * history.recent_acceptance - 1.5,
        history.accepted_all - 0.5,
        history.accepted_none,
        1.0,
    )


def _next_features(signals: DraftSignals, num_drafted: int, history: History) -> tuple[float, ...]:
    """(8,) of the token after the first num_drafted ones; later entries of `signals` are not used."""
    past = (2 * history.recent_acceptance - 1.5, history.accepted_all - 0.5, history.accepted_none, 1.0)
    if num_drafted == 0:
        return (1.0, 0.0, 0.0, 0.0, *past)
    confidence, entropy = signals.confidence[num_drafted - 1], signals.entropy[num_drafted - 1]
    return (0.0, logit(confidence) / 2 - 1, entropy / 2 - 0.5, math.log1p(num_drafted) / 2, *past)
