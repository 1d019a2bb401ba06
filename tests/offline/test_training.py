"""Predictors: exported arrays equal scikit-learn, files are checked, and acceptance models learn what they should."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_stack.controller.acceptance import FEATURES, History, OnlineAcceptance, Recalibrated, examples, features
from spec_stack.controller.base import DraftSignals
from spec_stack.controller.predictor import (
    STEP_FEATURES,
    TOKEN_FEATURES,
    Card,
    Network,
    load_step_predictor,
    load_token_predictor,
    save_predictor,
)
from spec_stack.controller.registry import make_policy
from spec_stack.offline.training import (
    as_network,
    calibration_error,
    fit_token_model,
    make_estimator,
    step_examples,
    token_examples,
)
from tests.support.controller_data import Greedy, runs, step
from tests.support.reference_controller import gap_by_bins, network_output


def card(kind: str = "token", **changes: Any) -> Card:
    names = TOKEN_FEATURES if kind == "token" else STEP_FEATURES
    values: dict[str, Any] = {"kind": kind, "model": "mlp", "features": names, "data_sha256": "0" * 64}
    return Card(**{**values, "num_examples": 10, "num_prompts": 2, **changes})


def network(num_inputs: int = len(TOKEN_FEATURES), hidden: int = 3) -> Network:
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
    assert Network(weights, biases).output(values) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ridge", "mlp-16"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_exported_step_model_predicts_what_scikit_learn_does(name: str) -> None:
    inputs, rates, _ = step_examples(runs())
    model = make_estimator(name).set_params(**({"max_iter": 20} if name != "ridge" else {})).fit(inputs, rates)
    exported = as_network(model)
    assert [exported.output(row) for row in inputs[:20].tolist()] == pytest.approx(model.predict(inputs[:20]).tolist())


@pytest.mark.parametrize("name", ["logistic", "mlp"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_exported_token_model_gives_scikit_learns_logit(name: str) -> None:
    inputs, accepted, _ = token_examples(runs(3))
    model = make_estimator(name).fit(inputs, accepted.astype(int))
    exported = as_network(model)
    chances = model.predict_proba(inputs[:20])[:, 1]
    logits = [math.log(chance / (1 - chance)) for chance in chances]
    assert [exported.output(row) for row in inputs[:20].tolist()] == pytest.approx(logits, abs=1e-6)


def test_forests_and_unknown_names_are_not_exported() -> None:
    with pytest.raises(ValueError, match="no layers to export"):
        as_network(make_estimator("rf-10").fit(np.eye(3), np.arange(3.0)))
    with pytest.raises(ValueError, match=r"unknown predictor 'tree'.*ridge"):
        make_estimator("tree")


def test_a_saved_predictor_is_loaded_equal_with_its_card(tmp_path: Path) -> None:
    path, saved = tmp_path / "token.json", network()
    save_predictor(path, saved, card(scores={"auc": 0.9}, versions={"numpy": "2"}))
    loaded = load_token_predictor(path)
    row = [0.5] * len(TOKEN_FEATURES)
    assert loaded.network.output(row) == saved.output(row)
    assert loaded.card == card(scores={"auc": 0.9}, versions={"numpy": "2"})
    assert 0 <= loaded.predict(row) <= 1


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
            content["card"]["kind"] = "step"
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
    path = tmp_path / "token.json"
    save_predictor(path, network(), card())
    path.write_text(json.dumps(damage(json.loads(path.read_text()), how)))
    with pytest.raises(ValueError, match=r"token\.json"):
        load_token_predictor(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04pickle", b'{"format": 1}'])
def test_files_that_are_no_json_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a predictor file"):
        load_token_predictor(path)


def test_policies_run_on_exported_predictors(tmp_path: Path) -> None:
    save_predictor(tmp_path / "token.json", network(), card())
    save_predictor(tmp_path / "step.json", network(len(STEP_FEATURES)), card("step"))
    throughput = make_policy("throughput", predictor=tmp_path / "token.json")
    speckv = make_policy("speckv", predictor=str(tmp_path / "step.json"))
    for policy in (throughput, speckv):
        policy.observe(step(4, 2))
    assert load_step_predictor(tmp_path / "step.json").acceptance_rate([0.0] * 6) <= 1
    with pytest.raises(ValueError, match="a step predictor, but a token predictor"):
        make_policy("throughput", predictor=tmp_path / "step.json")


def test_features_read_no_token_beyond_those_drafted() -> None:
    signals = DraftSignals([1.0, 2.0, 3.0], [0.9, 0.8, 0.7])
    other = DraftSignals([1.0, 2.0, 9.0], [0.9, 0.8, 0.1])
    for num_drafted in range(3):
        assert features(signals, num_drafted, History()) == features(other, num_drafted, History())
    assert len(features(signals, 3, History())) == len(FEATURES)


def test_examples_say_whether_everything_up_to_a_token_was_accepted() -> None:
    assert [accepted for _, accepted in examples(step(4, 2), History())] == [True, True, False, False]
    assert list(examples(step(0, 0), History())) == []


def test_history_fades_while_nothing_is_drafted() -> None:
    history, fresh = History(), History()
    for _ in range(30):
        history.observe(step(4, 0))
    assert history.recent_acceptance < 0.1
    for _ in range(60):
        history.observe(step(0, 0))
    assert history.recent_acceptance == pytest.approx(fresh.recent_acceptance, abs=1e-3)
    assert history.accepted_none == pytest.approx(0.0, abs=1e-3)


def test_online_acceptance_becomes_calibrated() -> None:
    rng = random.Random(0)
    model, history = OnlineAcceptance(optimism=0.0), History()
    chances, outcomes = [], []
    for number in range(1500):
        confidence = rng.choice((0.3, 0.95))
        right = {0.3: 0.2, 0.95: 0.9}[confidence]
        accepted = 0
        while accepted < 3 and rng.random() < right:
            accepted += 1
        record = step(3, accepted, confidence=confidence)
        if number >= 500:
            model.joint(record.signals, 0, history)
            chances.append(model.joint(record.signals, 1, history))
            outcomes.append(float(accepted >= 2))
        model.learn(record, history)
    by_level = {level: [o for c, o in zip(chances, outcomes, strict=True) if (c > 0.4) == level] for level in (0, 1)}
    means = {level: [c for c in chances if (c > 0.4) == level] for level in (0, 1)}
    for level in (0, 1):
        assert sum(means[level]) / len(means[level]) == pytest.approx(
            sum(by_level[level]) / len(by_level[level]), abs=0.07
        )


def test_a_rejected_run_does_not_count_for_each_of_its_tokens() -> None:
    long, short = OnlineAcceptance(), OnlineAcceptance()
    long.learn(step(16, 0), History())
    short.learn(step(1, 0), History())
    signals = step(4, 0).signals
    for model in (long, short):
        model.joint(signals, 0, History())
    assert long.joint(signals, 1, History()) == short.joint(signals, 1, History())


def test_recalibration_mends_a_model_that_is_too_sure() -> None:
    class TooSure:
        def predict(self, features: object) -> float:
            return 0.98

    rng = random.Random(3)
    model, history = Recalibrated(TooSure()), History()
    for _ in range(600):
        model.learn(step(1, int(rng.random() < 0.6)), history)
    assert model.joint(step(1, 1).signals, 0, history) == pytest.approx(0.6, abs=0.1)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_trained_token_models_beat_the_base_rate_on_unseen_prompts() -> None:
    inputs, accepted, groups = token_examples(runs(8))
    rate = accepted.mean()
    base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    for name in ("logistic", "mlp"):
        fitted = fit_token_model(name, inputs, accepted, groups, num_folds=4)
        assert fitted.scores["log_loss"] < 0.9 * base
        assert fitted.scores["ece"] < 0.1
        assert len(fitted.out_of_fold) == len(accepted)


def test_training_needs_prompts_and_two_outcomes() -> None:
    inputs, accepted, groups = token_examples(runs(2))
    with pytest.raises(ValueError, match="2 prompts for 5 folds"):
        fit_token_model("logistic", inputs, accepted, groups)
    with pytest.raises(ValueError, match="same outcome"):
        fit_token_model("logistic", inputs, np.ones(len(inputs)), groups, num_folds=2)
    with pytest.raises(ValueError, match="unknown token model"):
        fit_token_model("forest", inputs, accepted, groups)


def test_histories_do_not_leak_from_one_run_into_the_next() -> None:
    first, second = Greedy(0).record("a", 4), Greedy(1).record("b", 4)
    together, _, _ = token_examples([*first, *second])
    alone, _, groups = token_examples(second)
    assert together[-len(alone) :].tolist() == alone.tolist()
    assert set(groups) == {"b"}


def test_calibration_error_is_the_mean_gap_of_equal_bins() -> None:
    rng = np.random.default_rng(0)
    chances, outcomes = rng.random(200), rng.integers(0, 2, 200)
    assert calibration_error(chances, outcomes) == pytest.approx(gap_by_bins(chances.tolist(), outcomes.tolist(), 10))
