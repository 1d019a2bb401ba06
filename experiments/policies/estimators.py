"""The predictors of the paper's notebooks, and the file of one. Not a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_stack.bench.training import make_mlp
from spec_stack.controller.predictor import FORMAT, Network

STEP_MODELS = ("ridge", "mlp-16", "mlp-32", "rf-10", "rf-100")


def save_predictor(path: str | Path, network: Network, card: Mapping[str, Any]) -> None:
    """Write a predictor as JSON, numbers in full precision. card: its features, in order, and its provenance."""
    layers = [
        {"weights": matrix.tolist(), "bias": bias.tolist()}
        for matrix, bias in zip(network.weights, network.biases, strict=True)
    ]
    content = {"format": FORMAT, "card": dict(card), "layers": layers}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def make_estimator(name: str, seed: int = 42) -> Any:
    """An unfitted scikit-learn estimator, one of STEP_MODELS, as in the paper's notebooks."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import Ridge

    match name:
        case "ridge":
            return Ridge(alpha=1.0)
        case "mlp-16" | "mlp-32":
            return make_mlp(int(name[4:]), seed)
        case "rf-10":
            return RandomForestRegressor(10, max_depth=8, random_state=seed)
        case "rf-100":
            return RandomForestRegressor(100, random_state=seed)
    raise ValueError(f"unknown predictor {name!r}; known: {', '.join(STEP_MODELS)}")
