"""Fitting step predictors to records with scikit-learn, which is imported when something is fitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import FORMAT, Network, step_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


STEP_MODELS = ("ridge", "mlp-16", "mlp-32", "rf-10", "rf-100")


def save_predictor(path: str | Path, network: Network, card: Mapping[str, Any]) -> None:
    """Write a predictor as JSON, numbers in full precision. card: its features, in order, and its provenance."""
    layers = [
        {"weights": matrix.tolist(), "bias": bias.tolist()}
        for matrix, bias in zip(network.weights, network.biases, strict=True)
    ]
    content = {"format": FORMAT, "card": dict(card), "layers": layers}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def step_examples(records: Sequence[StepRecord]) -> tuple[Floats, Floats, list[str]]:
    """The paper's examples, made causal: inputs (n, 6), the `STEP_FEATURES` of the step before and the step's precision
    and gamma; the steps' acceptance rates (n,); and request ids, to split by. The records of a run are in order."""
    inputs, rates, groups = [], [], []
    for before, record in pairwise(records):
        follows = record.request_id == before.request_id and record.step == before.step + 1
        if follows and before.signals and record.gamma:
            inputs.append(step_features(before.signals, record.precision, record.gamma))
            rates.append(record.num_accepted / record.gamma)
            groups.append(record.request_id)
    return np.array(inputs), np.array(rates), groups


def make_estimator(name: str, seed: int = 42) -> Any:
    """An unfitted scikit-learn estimator, one of STEP_MODELS, as in the paper's notebooks."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor

    match name:
        case "ridge":
            return Ridge(alpha=1.0)
        case "mlp-16" | "mlp-32":
            return MLPRegressor(hidden_layer_sizes=(int(name[4:]),), max_iter=500, random_state=seed)
        case "rf-10":
            return RandomForestRegressor(10, max_depth=8, random_state=seed)
        case "rf-100":
            return RandomForestRegressor(100, random_state=seed)
    raise ValueError(f"unknown predictor {name!r}; known: {', '.join(STEP_MODELS)}")


def as_network(estimator: Any) -> Network:
    """The arrays of a fitted ridge or MLP estimator. Raises ValueError for what is not made of layers, as a forest."""
    if hasattr(estimator, "coefs_"):
        weights, biases = estimator.coefs_, estimator.intercepts_
    elif hasattr(estimator, "coef_"):
        weights, biases = [np.reshape(estimator.coef_, (-1, 1))], [np.reshape(estimator.intercept_, 1)]
    else:
        raise ValueError(f"{type(estimator).__name__} has no layers to export; use a linear model or an MLP")
    return Network(*([np.array(each, dtype=float) for each in own] for own in (weights, biases)))
