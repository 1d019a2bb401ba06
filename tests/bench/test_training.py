"""Predictors: exported arrays equal scikit-learn, and files are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.policies.estimators import make_estimator, save_predictor
from spec_stack.bench.training import as_network, step_examples
from spec_stack.controller.predictor import STEP_FEATURES, Network, load_step_predictor, step_features
from spec_stack.controller.registry import make_policy
from tests.support.controller_data import context, runs, step
from tests.support.reference_controller import network_output

CARD = {"model": "mlp", "features": STEP_FEATURES}


def network(num_inputs: int = len(STEP_FEATURES), hidden: int = 3) -> Network:
    rng = np.random.default_rng(0)
    return Network(
        [rng.normal(size=(num_inputs, hidden)), rng.normal(size=(hidden, 1))],
        [rng.normal(size=hidden), rng.normal(size=1)],
    )


@pytest.mark.parametrize("hidden", [0, 4])
def test_a_network_computes_its_layers(hidden: int) -> None:
    rng = np.random.default_rng(1)
    shapes = [(5, 1)] if hidden == 0 else [(5, hidden), (hidden, hidden), (hidden, 1)]
    weights, biases = [rng.normal(size=shape) for shape in shapes], [rng.normal(size=shape[1]) for shape in shapes]
    values = rng.normal(size=5).tolist()
    expected = network_output([matrix.tolist() for matrix in weights], [bias.tolist() for bias in biases], values)
    assert Network(weights, biases).outputs([values, values]).tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("name", ["ridge", "mlp-16"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_exported_step_model_predicts_what_scikit_learn_does(name: str) -> None:
    inputs, rates, _ = step_examples(runs())
    model = make_estimator(name).set_params(**({"max_iter": 20} if name != "ridge" else {})).fit(inputs, rates)
    exported = as_network(model)
    assert exported.outputs(inputs[:20].tolist()).tolist() == pytest.approx(model.predict(inputs[:20]).tolist())


def test_forests_and_unknown_names_are_not_exported() -> None:
    with pytest.raises(ValueError, match="no layers to export"):
        as_network(make_estimator("rf-10").fit(np.eye(3), np.arange(3.0)))
    with pytest.raises(ValueError, match=r"unknown predictor 'tree'.*ridge"):
        make_estimator("tree")


def test_a_saved_predictor_is_loaded_equal(tmp_path: Path) -> None:
    path, saved = tmp_path / "step.json", network()
    save_predictor(path, saved, CARD)
    loaded = load_step_predictor(path)
    row = [[0.5] * len(STEP_FEATURES)]
    assert loaded.outputs(row).tolist() == saved.outputs(row).tolist()
    assert 0 <= loaded.acceptance_rates(row)[0] <= 1


DAMAGES: dict[str, Callable[[Any], object]] = {
    "another format": lambda content: content.update(format="other/1"),
    "no layers": lambda content: content.pop("layers"),
    "a layer short": lambda content: content["layers"].pop(),
    "shapes that do not chain": lambda content: content["layers"][1].update(weights=[[1.0]] * 7),
    "not finite": lambda content: content["layers"][0].update(bias=[float("nan"), 0.0, 0.0]),
    "text for numbers": lambda content: content["layers"][0].update(bias=["a", "b", "c"]),
    "other features": lambda content: content["card"]["features"].reverse(),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "step.json"
    save_predictor(path, network(), CARD)
    content = json.loads(path.read_text())
    DAMAGES[how](content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"step\.json"):
        load_step_predictor(path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\x80\x04pickle"])
def test_files_that_are_no_json_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a predictor file"):
        load_step_predictor(path)


def test_a_policy_runs_on_an_exported_predictor(tmp_path: Path) -> None:
    save_predictor(tmp_path / "step.json", network(), CARD)
    predictor = load_step_predictor(tmp_path / "step.json")
    policy, last = make_policy("speckv", predictor=str(tmp_path / "step.json")), step(4, 2)
    policy.observe(step(0, 0))
    policy.observe(last)
    gammas = (2, 4, 6, 8)
    rates = predictor.acceptance_rates([step_features(last.signals, "fp16", gamma) for gamma in gammas])
    expected = {gamma: rate * gamma for gamma, rate in zip(gammas, rates, strict=True)}
    assert policy.choose(context(last=last)) == max(expected, key=expected.__getitem__)
