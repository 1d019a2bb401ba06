"""Fitting step predictors to records with scikit-learn, which is imported when something is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import Network, step_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Examples = tuple[Floats, Floats, list[str]]


def step_examples(records: Sequence[StepRecord]) -> Examples:
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


def make_mlp(num_hidden: int = 16, seed: int = 42) -> Any:
    """An unfitted scikit-learn MLP, as in the paper's notebooks."""
    from sklearn.neural_network import MLPRegressor

    return MLPRegressor(hidden_layer_sizes=(num_hidden,), max_iter=500, random_state=seed)


def as_network(estimator: Any) -> Network:
    """The arrays of a fitted ridge or MLP estimator. Raises ValueError for what is not made of layers, as a forest."""
    if hasattr(estimator, "coefs_"):
        weights, biases = estimator.coefs_, estimator.intercepts_
    elif hasattr(estimator, "coef_"):
        weights, biases = [np.reshape(estimator.coef_, (-1, 1))], [np.reshape(estimator.intercept_, 1)]
    else:
        raise ValueError(f"{type(estimator).__name__} has no layers to export; use a linear model or an MLP")
    return Network(*([np.array(each, dtype=float) for each in own] for own in (weights, biases)))
