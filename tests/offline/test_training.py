"""Predictors: exported arrays equal scikit-learn, files are checked, and the acceptance model learns what it should."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_stack.controller.acceptance import OnlineAcceptance
from spec_stack.controller.base import DraftSignals
from spec_stack.controller.predictor import (
    KIND,
    STEP_FEATURES,
    Card,
    Network,
    load_step_predictor,
    save_predictor,
    step_features,
)
from spec_stack.controller.registry import make_policy
from spec_stack.offline.training import as_network, make_estimator, step_examples
from tests.support.controller_data import context, runs, step
from tests.support.reference_controller import network_output


def card(**changes: Any) -> Card:
    values: dict[str, Any] = {"kind": KIND, "model": "mlp", "features": STEP_FEATURES, "data_sha256": "0" * 64}
    return Card(**{**values, "num_examples": 10, "num_prompts": 2, **changes})


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


def test_a_saved_predictor_is_loaded_equal_with_its_card(tmp_path: Path) -> None:
    path, saved = tmp_path / "step.json", network()
    save_predictor(path, saved, card(scores={"auc": 0.9}, versions={"numpy": "2"}))
    loaded = load_step_predictor(path)
    row = [[0.5] * len(STEP_FEATURES)]
    assert loaded.network.outputs(row).tolist() == saved.outputs(row).tolist()
    assert loaded.card == card(scores={"auc": 0.9}, versions={"numpy": "2"})
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
        case "unknown card entry":
            content["card"]["colour"] = "red"
        case "another kind":
            content["card"]["kind"] = "token"
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
        "unknown card entry",
        "another kind",
        "a list",
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "step.json"
    save_predictor(path, network(), card())
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
    save_predictor(tmp_path / "step.json", network(), card())
    predictor = load_step_predictor(tmp_path / "step.json")
    policy, last = make_policy("speckv", predictor=str(tmp_path / "step.json")), step(4, 2)
    policy.observe(last)
    gammas = (2, 4, 6, 8)
    rates = predictor.acceptance_rates([step_features(last.signals, "fp16", gamma) for gamma in gammas])
    expected = {gamma: rate * gamma for gamma, rate in zip(gammas, rates, strict=True)}
    assert policy.choose(context(last=last)) == max(expected, key=expected.__getitem__)


def test_a_predictor_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_predictor(path, network(), card())
    first = load_step_predictor(path)
    assert load_step_predictor(path) is first
    save_predictor(path, network(hidden=4), card())
    assert load_step_predictor(path).network.weights[0].shape == (len(STEP_FEATURES), 4)


def first(signals: DraftSignals, num_drafted: int) -> DraftSignals:
    return DraftSignals(signals.entropy[:num_drafted], signals.confidence[:num_drafted])


def test_what_a_bad_stretch_taught_of_the_next_step_fades_while_nothing_is_drafted() -> None:
    def chance(*num_drafted: int) -> float:
        model = OnlineAcceptance(trust=1e9)
        for gamma in num_drafted:
            model.learn(step(gamma, 0))
        model.begin()
        return model.extend(DraftSignals([1.0], [0.9]))[0]

    assert chance(*[4] * 30, *[0] * 60) > chance(*[4] * 30)


def test_online_acceptance_becomes_calibrated() -> None:
    rng = random.Random(0)
    model = OnlineAcceptance()
    chances, outcomes = [], []
    for number in range(1500):
        confidence = rng.choice((0.3, 0.95))
        right = {0.3: 0.2, 0.95: 0.9}[confidence]
        accepted = 0
        while accepted < 3 and rng.random() < right:
            accepted += 1
        record = step(3, accepted, confidence=confidence)
        if number >= 500:
            model.begin()
            chances.append(model.extend(first(record.signals, 1))[1])
            outcomes.append(float(accepted >= 2))
        model.learn(record)
    by_level = {level: [o for c, o in zip(chances, outcomes, strict=True) if (c > 0.4) == level] for level in (0, 1)}
    means = {level: [c for c in chances if (c > 0.4) == level] for level in (0, 1)}
    for level in (0, 1):
        assert sum(means[level]) / len(means[level]) == pytest.approx(
            sum(by_level[level]) / len(by_level[level]), abs=0.11
        )


def test_a_rejected_run_does_not_count_for_each_of_its_tokens() -> None:
    long, short = OnlineAcceptance(), OnlineAcceptance()
    long.learn(step(16, 0))
    short.learn(step(1, 0))
    signals = first(step(4, 0).signals, 1)
    long.begin()
    short.begin()
    assert long.extend(signals) == short.extend(signals)


def test_the_chance_of_a_proposal_does_not_depend_on_how_often_it_was_asked_for() -> None:
    model, signals = OnlineAcceptance(), DraftSignals([1.0, 2.0, 0.5], [0.9, 0.6, 0.8])
    model.begin()
    one_by_one = [model.extend(first(signals, num_drafted)) for num_drafted in (1, 2, 3)]
    model.begin()
    assert model.extend(signals) == one_by_one[-1]
    assert len(set(one_by_one)) == 3
