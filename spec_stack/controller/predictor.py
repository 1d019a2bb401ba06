"""Predictors trained by `experiments.policies.train_controller`, stored as arrays in JSON, run in numpy.

A step predictor is the SpecKV paper's (section 4.3): a step's acceptance rate from its signals and a candidate gamma.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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


class Network:
    """Dense layers with ReLU between them, one output. A single layer is a linear model."""

    def __init__(self, weights: Sequence[Floats], biases: Sequence[Floats]) -> None:
        """weights[i] is (inputs, outputs). Raises ValueError where shapes do not chain, or a number is not finite."""
        if not weights or len(weights) != len(biases):
            raise ValueError(f"{len(weights)} weight matrices for {len(biases)} biases")
        for index, (matrix, bias) in enumerate(zip(weights, biases, strict=True)):
            if matrix.ndim != 2 or bias.shape != (matrix.shape[1],):
                raise ValueError(f"layer {index}: weights {matrix.shape} do not go with biases {bias.shape}")
            if index and matrix.shape[0] != weights[index - 1].shape[1]:
                raise ValueError(
                    f"layer {index} takes {matrix.shape[0]} values, layer {index - 1} gives another number"
                )
            if not (np.isfinite(matrix).all() and np.isfinite(bias).all()):
                raise ValueError(f"layer {index} holds a value that is not finite")
        if weights[-1].shape[1] != 1:
            raise ValueError(f"the last layer gives {weights[-1].shape[1]} values, not 1")
        self.weights = list(weights)
        self.biases = list(biases)

    @property
    def num_inputs(self) -> int:
        return int(self.weights[0].shape[0])

    def outputs(self, features: Sequence[Sequence[float]]) -> Floats:
        """The raw outputs (n,) for n examples (n, inputs). Batch the examples: one call keeps a decision cheap."""
        values = np.array(features, dtype=np.float64)
        for matrix, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            values = np.maximum(values @ matrix + bias, 0.0)
        return np.asarray((values @ self.weights[-1])[:, 0] + self.biases[-1][0], dtype=np.float64)


class StepPredictor:
    """The paper's predictor: acceptance rates in [0, 1] from STEP_FEATURES."""

    def __init__(self, network: Network, card: Card) -> None:
        self.network = network
        self.card = card

    def acceptance_rates(self, features: Sequence[Sequence[float]]) -> list[float]:
        """In [0, 1], of (n, 6) features as `step_features` makes them."""
        rates: list[float] = self.network.outputs(features).clip(0.0, 1.0).tolist()
        return rates


def load_step_predictor(path: str | Path) -> StepPredictor:
    """A step predictor from a file or folder, cached until the file changes. Raises ValueError for a bad or missing
    file.
    """
    path = Path(path).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    return _load_step_predictor(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _load_step_predictor(path: Path, mtime_ns: int, size: int) -> StepPredictor:
    network, card = read_predictor(path)
    if card.kind != KIND:
        raise ValueError(f"{path}: a {card.kind} predictor, but a {KIND} predictor is needed here")
    if card.features != STEP_FEATURES:
        raise ValueError(
            f"{path}: trained on features {list(card.features)}, not {list(STEP_FEATURES)}; train it again"
        )
    return StepPredictor(network, card)


def read_predictor(path: Path) -> tuple[Network, Card]:
    """The network and card of a predictor file of any kind. Raises ValueError for a damaged or foreign file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a predictor file ({error})") from None
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
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged predictor file ({error})") from None
    if network.num_inputs != len(card.features):
        raise ValueError(f"{path}: {network.num_inputs} inputs for {len(card.features)} features")
    if not all(math.isfinite(score) for score in card.scores.values()):
        raise ValueError(f"{path}: a score in the card is not finite")
    return network, card
