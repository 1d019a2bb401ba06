"""Token models, kept to measure again that they lose: what they are fitted to, and that they are fitted well."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from experiments.policies.token_model import (
    FEATURES,
    Recalibrated,
    calibration_error,
    examples,
    features,
    fit_token_model,
    make_token_estimator,
    token_examples,
)
from spec_stack.controller.acceptance import History
from spec_stack.controller.base import DraftSignals
from spec_stack.controller.predictor import Network
from spec_stack.offline.training import as_network
from tests.support.controller_data import Greedy, runs, step
from tests.support.reference_controller import gap_by_bins


@pytest.mark.parametrize("name", ["logistic", "mlp"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_exported_token_model_gives_scikit_learns_logit(name: str) -> None:
    inputs, accepted, _ = token_examples(runs(3))
    model = make_token_estimator(name).fit(inputs, accepted.astype(int))
    exported = as_network(model)
    chances = model.predict_proba(inputs[:20])[:, 1]
    logits = [math.log(chance / (1 - chance)) for chance in chances]
    assert [exported.output(row) for row in inputs[:20].tolist()] == pytest.approx(logits, abs=1e-6)


def test_features_read_no_token_beyond_those_drafted() -> None:
    signals = DraftSignals([1.0, 2.0, 3.0], [0.9, 0.8, 0.7])
    other = DraftSignals([1.0, 2.0, 9.0], [0.9, 0.8, 0.1])
    for num_drafted in range(3):
        assert features(signals, num_drafted, History()) == features(other, num_drafted, History())
    assert len(features(signals, 3, History())) == len(FEATURES)


def test_examples_say_whether_everything_up_to_a_token_was_accepted() -> None:
    assert [accepted for _, accepted in examples(step(4, 2), History())] == [True, True, False, False]
    assert list(examples(step(0, 0), History())) == []


def test_recalibration_mends_a_model_that_is_too_sure() -> None:
    too_sure = Network([np.zeros((len(FEATURES), 1))], [np.array([math.log(0.98 / 0.02)])])
    rng = random.Random(3)
    model, history = Recalibrated(too_sure), History()
    assert model.begin(history) == pytest.approx(0.98)
    for _ in range(600):
        model.learn(step(1, int(rng.random() < 0.6)), history)
    assert model.begin(history) == pytest.approx(0.6, abs=0.1)


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
