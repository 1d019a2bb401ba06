"""Predictors: exported arrays equal scikit-learn, and files are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.policies.estimators import make_estimator, save_predictor
from spec_stack.bench.training import as_network, step_examples
from spec_stack.controller.predictor import (
    STEP_FEATURES,
    Network,
    load_step_predictor,
    step_features,
)
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


def damage(content: dict[str, Any], how: str) -> Any:
    match how:
        case "another format":
            content["format"] = "other/1"
        case "no layers":
            del content["layers"]
        case "a layer short":
            content["layers"] = content["layers"][:1]
        case "shapes that do not chain":
            content["layers"][1]["weights"] = [[1.0]] * 7
        case "not finite":
            content["layers"][0]["bias"][0] = float("nan")
        case "text for numbers":
            content["layers"][0]["bias"] = ["a", "b", "c"]
        case "ragged":
            content["layers"][0]["weights"][0] = [1.0]
        case "other features":
            content["card"]["features"][0] = "something"
        case "a list":
            return [content]
    return content


@pytest.mark.parametrize(
    "how",
    [
        "another format",
        "no layers",
        "a layer short",
        "shapes that do not chain",
        "not finite",
        "text for numbers",
        "ragged",
        "other features",
        "a list",
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "step.json"
    save_predictor(path, network(), CARD)
    path.write_text(json.dumps(damage(json.loads(path.read_text()), how)))
    with pytest.raises(ValueError, match=r"step\.json"):
        load_step_predictor(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04pickle", b'{"format": 1}'])
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


def test_a_predictor_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_predictor(path, network(), CARD)
    assert load_step_predictor(path).weights[0].shape == (len(STEP_FEATURES), 3)
    save_predictor(path, network(hidden=4), CARD)
    assert load_step_predictor(path).weights[0].shape == (len(STEP_FEATURES), 4)
