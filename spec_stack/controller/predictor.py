"""Predictors trained by `experiments.policies.train_controller`, stored as arrays in JSON, run in numpy.

A step predictor is the SpecKV paper's (section 4.3): a step's acceptance rate from its signals and a candidate gamma.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spec_stack.controller.base import DraftSignals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FILE_NAME = "spec_stack_predictor.json"
"""The file that `speckv` looks for beside a draft, as a calibration is."""
STEP_FEATURES = ("mean_entropy", "mean_confidence", "max_entropy", "min_confidence", "precision_code", "gamma")
PRECISION_CODES = {"fp32": 0.0, "fp16": 0.0, "bf16": 0.0, "int8": 1.0, "nf4": 2.0}
"""The paper's ordinal code; precisions it did not measure share the unquantised one's."""
FORMAT = "spec-stack-predictor/1"


def step_features(signals: DraftSignals, precision: str, gamma: int) -> tuple[float, ...]:
    """STEP_FEATURES of one step's signals for a candidate gamma."""
    return (
        sum(signals.entropy) / len(signals),
        sum(signals.confidence) / len(signals),
        max(signals.entropy),
        min(signals.confidence),
        PRECISION_CODES.get(precision, 0.0),
        float(gamma),
    )


@dataclass(frozen=True)
class Network:
    """Dense layers with ReLU between them, one output. A single layer is a linear model. weights: (inputs, outputs) of
    each layer."""

    weights: Sequence[Floats]
    biases: Sequence[Floats]

    def outputs(self, features: Sequence[Sequence[float]]) -> Floats:
        """The raw outputs (n,) for n examples (n, inputs). Batch the examples: one call keeps a decision cheap."""
        values = np.array(features, dtype=np.float64)
        *hidden, (last, offset) = zip(self.weights, self.biases, strict=True)
        for matrix, bias in hidden:
            values = np.maximum(values @ matrix + bias, 0.0)
        return (values @ last + offset).reshape(len(features))

    def acceptance_rates(self, features: Sequence[Sequence[float]]) -> list[float]:
        """The outputs as rates, in [0, 1]."""
        rates: list[float] = self.outputs(features).clip(0.0, 1.0).tolist()
        return rates


def load_step_predictor(path: str | Path) -> Network:
    """A step predictor, on STEP_FEATURES, from a file or folder. Raises ValueError for a bad or missing file."""
    path = Path(path).expanduser()
    return read_network(path / FILE_NAME if path.is_dir() else path, STEP_FEATURES)


def read_network(path: Path, features: Sequence[str]) -> Network:
    """The network of a predictor on these features. Raises ValueError for a missing, damaged or foreign file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a predictor file of format {FORMAT}; train one with experiments.policies.train_controller"
        )
    try:
        found = content["card"]["features"]
        weights = [np.array(layer["weights"], dtype=float) for layer in content["layers"]]
        biases = [np.array(layer["bias"], dtype=float) for layer in content["layers"]]
        network = Network(weights, biases)
        is_finite = bool(np.isfinite(network.outputs([[0.0] * len(found)])).all())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged predictor file ({error})") from None
    if found != list(features) or not is_finite:
        raise ValueError(
            f"{path}: a predictor on {found}, or with values that are not finite; one on {list(features)} is needed "
            "here, so train it again"
        )
    return network
