"""P(every token drafted so far is right, and the next one): a small MLP asked inside the draft, corrected online."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from spec_stack.controller.acceptance import OnlineLogistic, sigmoid
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.predictor import Network, read_predictor

FILE = Path(__file__).parents[1] / "assets" / "survival.json"
"""The weights, fitted to recorded texts of one pretrained pair."""
KIND = "survival"
SURVIVAL_FEATURES = (
    "log_confidence",
    "log_rest",
    "entropy",
    "confidence_before",
    "entropy_before",
    "is_of_the_next",
)
_LEAST_CONFIDENCE = 1e-4
_LEAST_CURVATURE = 0.01


def survival_features(signals: DraftSignals, index: int) -> tuple[list[float], list[float]]:
    """SURVIVAL_FEATURES (6,) of what the index-th drafted token says of itself, and of the one behind it.

    The first has none before it: that counts as sure.
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
    """The network that the package has. Raises ValueError where the file is damaged."""
    network, card = read_predictor(FILE)
    if card.kind != KIND or card.features != SURVIVAL_FEATURES:
        raise ValueError(f"{FILE}: a {card.kind} predictor on {list(card.features)}, not one of survival; reinstall")
    return network


class Survival:
    """The MLP of the SpecKV paper in another place: asked per drafted token, and corrected by what comes of its words.

    A proposal survives with the product of its tokens' chances. Each is the MLP's logit, from the draft's confidence
    and entropy at the token and at the one before; scaled and moved by two regressions that all requests teach (another
    pair, sampling, quantised weights), and moved by what this request's tokens came to. The chance of the next token,
    not drafted yet, is the same network's, asked of the last one. It is an `AcceptanceModel`.

    Parameters
    ----------
    trust, forgetting : float
        Of what all requests teach, as in `OnlineLogistic`.
    own_trust : float
        Evidence, in tokens of an even chance times a quarter, that a request's own correction takes to count half.
    network : Network, optional
        On SURVIVAL_FEATURES, with a logit for output; the shipped one where none is given.
    """

    def __init__(
        self, trust: float = 20.0, forgetting: float = 0.999, own_trust: float = 5.0, network: Network | None = None
    ) -> None:
        if own_trust <= 0:
            raise ValueError(f"own_trust must be over 0, got {own_trust}")
        self._network = network or shipped_network()
        self._own = OnlineLogistic((2.0, 0.0), trust, forgetting)
        self._next = OnlineLogistic((2.0, 0.0), trust, forgetting)
        self._own_trust = own_trust
        self._begin_request()
        self.begin()

    def _begin_request(self) -> None:
        self._shift, self._evidence = 0.0, self._own_trust

    def begin(self) -> None:
        """A step begins."""
        self._survival, self._with_next = 1.0, 1.0
        # Of the proposal that was last asked about, by drafted token: the network's two logits.
        self._signals: DraftSignals | None = None
        self._logits: list[tuple[float, float]] = []

    def extend(self, signals: DraftSignals) -> tuple[float, float]:
        """P(all tokens drafted so far are accepted), and P(all these and the next one are)."""
        self._signals = signals
        for index in range(len(self._logits), len(signals)):
            own, behind = self._asked(signals, index)
            self._logits.append((own, behind))
            self._survival *= sigmoid(self._own.logit((own / 2, 1.0)) + self._shift)
            self._with_next = self._survival * sigmoid(self._next.logit((behind / 2, 1.0)) + self._shift)
        return self._survival, self._with_next

    def _asked(self, signals: DraftSignals, index: int) -> tuple[float, float]:
        own, behind = self._network.outputs(survival_features(signals, index)).tolist()
        return own, behind

    def learn(self, record: StepRecord) -> None:
        """From each token up to the first wrong one; those after it tell nothing of their own."""
        if record.is_prefill:
            self._begin_request()
            return
        signals, accepted = record.signals, record.num_drafted_accepted
        known = self._logits if signals is self._signals else []
        for index in range(min(accepted + 1, len(signals))):
            own, behind = known[index] if index < len(known) else self._asked(signals, index)
            is_right = index < accepted
            self._correct(own, is_right)
            if is_right and index + 1 < len(signals):
                self._next.learn((behind / 2, 1.0), index + 1 < accepted)

    def _correct(self, logit: float, is_right: bool) -> None:
        features = (logit / 2, 1.0)
        expected = sigmoid(self._own.logit(features) + self._shift)
        self._evidence += max(expected * (1 - expected), _LEAST_CURVATURE)
        self._shift += (is_right - expected) / self._evidence
        self._own.learn(features, is_right)
