"""The trained acceptance models that `throughput` does not use. Not a script.

A token model maps FEATURES to P(all tokens drafted so far and the next one are accepted), calibrated on prompts it was
not fitted on. None has given more tokens/s than the model that `throughput` learns online (../LOG.md, "The
controller"), so the library has no place for one; they are kept here to measure that again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_stack.controller.acceptance import History, OnlineLogistic, logit, sigmoid
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.predictor import Network
from spec_stack.offline.training import as_network

Floats = NDArray[np.float64]

TOKEN_MODELS = ("logistic", "mlp")
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


def features(signals: DraftSignals, num_drafted: int, history: History) -> tuple[float, ...]:
    """FEATURES after num_drafted tokens; later entries of `signals` are not used."""
    past = (history.recent_acceptance, history.accepted_all, history.accepted_none)
    if num_drafted == 0:
        return (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *past)
    drafted = signals.confidence[:num_drafted]
    log_joint = sum(math.log(max(confidence, 1e-3)) for confidence in drafted)
    return (
        0.0,
        math.log(num_drafted),
        max(log_joint, -20.0),
        logit(drafted[-1]),
        logit(min(drafted)),
        min(signals.entropy[num_drafted - 1], 8.0),
        *past,
    )


def examples(record: StepRecord, history: History) -> Iterator[tuple[tuple[float, ...], bool]]:
    """What one step teaches: before each drafted token, was it and all before it accepted?"""
    for num_drafted in range(len(record.signals)):
        yield features(record.signals, num_drafted, history), record.num_accepted > num_drafted


def token_examples(records: Sequence[StepRecord]) -> tuple[Floats, Floats, list[str]]:
    """Inputs (n, 9), outcomes (n,) and request ids; the history runs along each run."""
    inputs, outcomes, groups = [], [], []
    history, run = History(), ("", "", "", 0.0)
    for record in records:
        if (key := (record.request_id, record.policy, record.precision, record.keep_rate)) != run:
            history, run = History(), key
        for values, accepted in examples(record, history):
            inputs.append(values)
            outcomes.append(float(accepted))
            groups.append(record.request_id)
        history.observe(record)
    return np.array(inputs), np.array(outcomes), groups


class Frozen:
    """A trained model as fitted, in the place of `throughput`'s own (`AcceptanceModel`)."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._history = History()

    def begin(self, history: History) -> float:
        self._history = history
        return self.extend(DraftSignals())

    def extend(self, signals: DraftSignals) -> float:
        return sigmoid(self._network.output(features(signals, len(signals), self._history)))

    def learn(self, record: StepRecord, history: History) -> None:
        """Nothing."""


class Recalibrated:
    """The same, its logit scaled and shifted online, so that it may be used on another pair or task."""

    def __init__(self, network: Network, trust: float = 20.0) -> None:
        self._network = network
        self._line = OnlineLogistic((1.0, 0.0), trust, forgetting=1.0)
        self._history = History()

    def begin(self, history: History) -> float:
        self._history = history
        return self.extend(DraftSignals())

    def extend(self, signals: DraftSignals) -> float:
        return sigmoid(self._line.logit(self._inner(features(signals, len(signals), self._history))))

    def learn(self, record: StepRecord, history: History) -> None:
        """From one token a step, in turn: a step's outcomes are one event, not gamma of them."""
        if not record.signals:
            return
        chosen = record.step % len(record.signals)
        inner = self._inner(features(record.signals, chosen, history))
        self._line.learn(inner, record.num_accepted > chosen)

    def _inner(self, values: Sequence[float]) -> tuple[float, float]:
        return logit(sigmoid(self._network.output(values)), 1e-4), 1.0


def make_token_estimator(name: str, seed: int = 42) -> Any:
    """An unfitted scikit-learn estimator, one of TOKEN_MODELS. Raises ValueError for an unknown name."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    match name:
        case "logistic":
            return make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
        case "mlp":
            network = MLPClassifier((16,), alpha=1e-2, max_iter=200, early_stopping=True, random_state=seed)
            return make_pipeline(StandardScaler(), network)
    raise ValueError(f"unknown token model {name!r}; known: {', '.join(TOKEN_MODELS)}")


def rescaled(network: Network, scale: float, shift: float) -> Network:
    """The network with scale * output + shift for its output."""
    weights = [*network.weights[:-1], network.weights[-1] * scale]
    return Network(weights, [*network.biases[:-1], network.biases[-1] * scale + shift])


@dataclass(frozen=True)
class FittedToken:
    """A calibrated network and how it did on prompts it had not seen; out_of_fold holds those probabilities."""

    network: Network
    scores: Mapping[str, float]
    out_of_fold: Floats


def fit_token_model(
    name: str, inputs: Floats, accepted: Floats, groups: Sequence[str], num_folds: int = 5
) -> FittedToken:
    """Fit one of TOKEN_MODELS, calibrate it (Platt) and score it on folds grouped by prompt.

    The final network is fitted on everything and carries the calibration found on the held-out folds. Scores are
    log_loss, brier, auc and ece of held-out predictions, each fold calibrated on the other folds' alone. Raises
    ValueError for fewer prompts than folds or a single outcome.
    """
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
    from sklearn.model_selection import GroupKFold

    unfitted = make_token_estimator(name)
    labels = np.asarray(accepted, dtype=int)
    if len(set(groups)) < num_folds:
        raise ValueError(f"{len(set(groups))} prompts for {num_folds} folds; record more prompts or use fewer folds")
    if len(set(labels.tolist())) < 2:
        raise ValueError("every example has the same outcome; nothing can be learned from these records")
    logits = np.zeros(len(labels))
    fold_of = np.zeros(len(labels), dtype=int)
    for fold, (train, test) in enumerate(GroupKFold(num_folds).split(inputs, labels, groups)):
        network = as_network(clone(unfitted).fit(inputs[train], labels[train]))
        logits[test] = [network.output(row) for row in inputs[test].tolist()]
        fold_of[test] = fold

    def platt(mask: NDArray[np.bool_]) -> tuple[float, float]:
        fit = LogisticRegression(C=1e6).fit(logits[mask, None], labels[mask])
        return float(fit.coef_[0, 0]), float(fit.intercept_[0])

    held_out = np.zeros(len(labels))
    for fold in range(num_folds):
        scale, shift = platt(fold_of != fold)
        test = fold_of == fold
        held_out[test] = [sigmoid(scale * value + shift) for value in logits[test]]
    scores = {
        "log_loss": float(log_loss(labels, held_out)),
        "brier": float(brier_score_loss(labels, held_out)),
        "auc": float(roc_auc_score(labels, held_out)),
        "ece": calibration_error(held_out, labels),
    }
    final = rescaled(as_network(unfitted.fit(inputs, labels)), *platt(np.ones(len(labels), dtype=bool)))
    return FittedToken(final, scores, held_out)


def calibration_error(probabilities: Floats, accepted: NDArray[Any], num_bins: int = 10) -> float:
    """Expected calibration error: |mean prediction - mean outcome| over equal-count bins, weighted by their size."""
    order = np.argsort(probabilities, kind="stable")
    parts = np.array_split(order, min(num_bins, len(order)))
    gaps = [len(part) * abs(probabilities[part].mean() - accepted[part].mean()) for part in parts]
    return float(sum(gaps) / len(order))
