"""Fitting predictors to records with scikit-learn. Offline only; scikit-learn is imported when something is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_stack.controller.acceptance import History, examples, sigmoid
from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import STEP_MODELS, TOKEN_MODELS, Network, step_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def token_examples(records: Sequence[StepRecord]) -> tuple[Floats, Floats, list[str]]:
    """Inputs (TOKEN_FEATURES), outcomes and request ids for a token model; the history runs along each run."""
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


def step_examples(records: Sequence[StepRecord]) -> tuple[Floats, Floats, list[str]]:
    """Signals of the step before, precision and gamma against the acceptance rate: the paper's, made causal."""
    inputs, rates, groups = [], [], []
    for before, record in pairwise(records):
        follows = record.request_id == before.request_id and record.step == before.step + 1
        if follows and before.signals and record.gamma:
            inputs.append(step_features(before.signals, record.precision, record.gamma))
            rates.append(record.num_accepted / record.gamma)
            groups.append(record.request_id)
    return np.array(inputs), np.array(rates), groups


def make_estimator(name: str, seed: int = 42) -> Any:
    """An unfitted scikit-learn estimator: STEP_MODELS as in the paper's notebooks, TOKEN_MODELS as ours.

    Raises ValueError for an unknown name.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    match name:
        case "ridge":
            return Ridge(alpha=1.0)
        case "mlp-16" | "mlp-32":
            return MLPRegressor(hidden_layer_sizes=(int(name[4:]),), max_iter=500, random_state=seed)
        case "rf-10":
            return RandomForestRegressor(10, max_depth=8, random_state=seed)
        case "rf-100":
            return RandomForestRegressor(100, random_state=seed)
        case "logistic":
            return make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
        case "mlp":
            network = MLPClassifier((16,), alpha=1e-2, max_iter=200, early_stopping=True, random_state=seed)
            return make_pipeline(StandardScaler(), network)
    raise ValueError(f"unknown predictor {name!r}; known: {', '.join((*STEP_MODELS, *TOKEN_MODELS))}")


def as_network(estimator: Any) -> Network:
    """The arrays of a fitted ridge, logistic or MLP estimator, a scaler before it folded into the first layer.

    Raises ValueError for an estimator that is not made of layers, such as a forest.
    """
    scaler = None
    if hasattr(estimator, "steps"):
        scaler, estimator = estimator.steps[0][1], estimator.steps[-1][1]
    if hasattr(estimator, "coefs_"):
        weights = [np.array(matrix, dtype=float) for matrix in estimator.coefs_]
        biases = [np.array(bias, dtype=float) for bias in estimator.intercepts_]
    elif hasattr(estimator, "coef_"):
        weights = [np.array(estimator.coef_, dtype=float).reshape(-1, 1)]
        biases = [np.array(estimator.intercept_, dtype=float).reshape(1)]
    else:
        raise ValueError(f"{type(estimator).__name__} has no layers to export; use a linear model or an MLP")
    if scaler is not None:
        biases[0] = biases[0] - (scaler.mean_ / scaler.scale_) @ weights[0]
        weights[0] = weights[0] / scaler.scale_[:, None]
    return Network(weights, biases)


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
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
    from sklearn.model_selection import GroupKFold

    if name not in TOKEN_MODELS:
        raise ValueError(f"unknown token model {name!r}; known: {', '.join(TOKEN_MODELS)}")
    labels = np.asarray(accepted, dtype=int)
    if len(set(groups)) < num_folds:
        raise ValueError(f"{len(set(groups))} prompts for {num_folds} folds; record more prompts or use fewer folds")
    if len(set(labels.tolist())) < 2:
        raise ValueError("every example has the same outcome; nothing can be learned from these records")
    logits = np.zeros(len(labels))
    fold_of = np.zeros(len(labels), dtype=int)
    for fold, (train, test) in enumerate(GroupKFold(num_folds).split(inputs, labels, groups)):
        network = as_network(make_estimator(name).fit(inputs[train], labels[train]))
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
    final = as_network(make_estimator(name).fit(inputs, labels)).rescaled(*platt(np.ones(len(labels), dtype=bool)))
    return FittedToken(final, scores, held_out)


def calibration_error(probabilities: Floats, accepted: NDArray[Any], num_bins: int = 10) -> float:
    """Expected calibration error: |mean prediction - mean outcome| over equal-count bins, weighted by their size."""
    order = np.argsort(probabilities, kind="stable")
    parts = np.array_split(order, min(num_bins, len(order)))
    gaps = [len(part) * abs(probabilities[part].mean() - accepted[part].mean()) for part in parts]
    return float(sum(gaps) / len(order))
