"""Predictors trained by `experiments.policies.train_controller`, stored as arrays in JSON, run in numpy.

A step predictor is the SpecKV paper's (section 4.3): a step's acceptance rate from its signals and a candidate gamma.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spec_stack.controller.base import DraftSignals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

KIND = "step"
FILE_NAME = "spec_stack_predictor.json"
"""The file that `speckv` looks for beside a draft, as a calibration is."""
STEP_FEATURES = ("mean_entropy", "mean_confidence", "max_entropy", "min_confidence", "precision_code", "gamma")
PRECISION_CODES = {"fp32": 0.0, "fp16": 0.0, "bf16": 0.0, "int8": 1.0, "nf4": 2.0}
"""The paper's ordinal code; precisions it did not measure share the unquantised one's."""
FORMAT = "spec-stack-predictor/1"


def step_features(signals: DraftSignals, precision: str, gamma: int) -> tuple[float, ...]:
    """STEP_FEATURES of one step's signals for a candidate gamma."""
    return (
        signals.mean_entropy,
        signals.mean_confidence,
        signals.max_entropy,
        signals.min_confidence,
        PRECISION_CODES.get(precision, 0.0),
        float(gamma),
    )


@dataclass(frozen=True)
class Card:
    """Provenance of a predictor: kind (what it predicts), model (the exported estimator), features (in order),
    data_sha256 (of the training records), versions (of the libraries), scores (on held-out prompts).
    """

    kind: str
    model: str
    features: tuple[str, ...]
    data_sha256: str
    num_examples: int
    num_prompts: int
    versions: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


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


@dataclass(frozen=True)
class StepPredictor:
    """The paper's predictor: acceptance rates in [0, 1] from STEP_FEATURES."""

    network: Network
    card: Card

    def acceptance_rates(self, features: Sequence[Sequence[float]]) -> list[float]:
        """In [0, 1], of (n, 6) features as `step_features` makes them."""
        rates: list[float] = self.network.outputs(features).clip(0.0, 1.0).tolist()
        return rates


def load_step_predictor(path: str | Path) -> StepPredictor:
    """A step predictor from a file or folder. Raises ValueError for a bad or missing file."""
    path = Path(path).expanduser()
    return StepPredictor(*read_predictor(path / FILE_NAME if path.is_dir() else path, KIND, STEP_FEATURES))


def read_predictor(path: Path, kind: str, features: Sequence[str]) -> tuple[Network, Card]:
    """The network and card of a predictor of this kind. Raises ValueError for a missing, damaged or foreign file."""
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
        raw = content["card"]
        card = Card(**{**raw, "features": tuple(raw["features"])})
        weights = [np.array(layer["weights"], dtype=float) for layer in content["layers"]]
        biases = [np.array(layer["bias"], dtype=float) for layer in content["layers"]]
        network = Network(weights, biases)
        is_finite = bool(np.isfinite(network.outputs([[0.0] * len(card.features)])).all())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged predictor file ({error})") from None
    if card.kind != kind or card.features != tuple(features) or not is_finite:
        raise ValueError(
            f"{path}: a {card.kind} predictor on {list(card.features)}, or with values that are not finite; a {kind} "
            f"predictor on {list(features)} is needed here, so train it again"
        )
    return network, card
