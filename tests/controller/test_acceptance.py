"""The acceptance estimator: a product of an MLP's chances, recalibrated by outcomes."""

from __future__ import annotations

import json
import math
import random

import pytest

from spec_stack.controller.acceptance import FILE, AcceptanceEstimator
from spec_stack.controller.base import DraftSignals
from tests.support.controller_data import step
from tests.support.reference_controller import network_output, survival

SIGNALS = DraftSignals([1.0, 2.0, 0.5], [0.9, 0.6, 0.8])


def first(signals: DraftSignals, num_drafted: int) -> DraftSignals:
    return DraftSignals(signals.entropy[:num_drafted], signals.confidence[:num_drafted])


def chances(model: AcceptanceEstimator, signals: DraftSignals) -> list[tuple[float, float]]:
    model.reset()
    return [model.update(first(signals, number)) for number in range(1, len(signals) + 1)]


def test_an_untaught_model_says_the_product_of_what_the_shipped_weights_say() -> None:
    layers = json.loads(FILE.read_text(encoding="utf-8"))["layers"]
    weights, biases = [layer["weights"] for layer in layers], [layer["bias"] for layer in layers]

    def said(index: int, is_of_next: float) -> float:
        confidence = SIGNALS.confidence[index]
        before = (SIGNALS.confidence[index - 1], SIGNALS.entropy[index - 1]) if index else (1.0, 0.0)
        values = [math.log(confidence), math.log(1 - confidence), SIGNALS.entropy[index], *before, is_of_next]
        return network_output(weights, biases, values)

    expected = survival([said(index, 0.0) for index in range(3)], [said(index, 1.0) for index in range(3)])
    for found, wanted in zip(chances(AcceptanceEstimator(), SIGNALS), expected, strict=True):
        assert found == pytest.approx(wanted)


def test_a_surer_draft_is_believed_more_and_extremes_are_finite() -> None:
    survivals = [
        AcceptanceEstimator().update(DraftSignals([entropy], [sure]))[0] for entropy, sure in ((3.0, 0.3), (0.2, 0.97))
    ]
    assert survivals[0] < 0.6 < 0.9 < survivals[1]
    for confidence in (0.0, 1e-30, 1.0):
        for chance in AcceptanceEstimator().update(DraftSignals([0.0], [confidence])):
            assert 0 < chance < 1


def test_the_chance_of_a_proposal_does_not_depend_on_how_often_it_was_asked_for() -> None:
    model = AcceptanceEstimator()
    one_by_one = chances(model, SIGNALS)
    model.reset()
    assert model.update(SIGNALS) == one_by_one[-1]
    assert len(set(one_by_one)) == 3


def test_a_rejected_run_does_not_count_for_each_of_its_tokens() -> None:
    long, short = AcceptanceEstimator(), AcceptanceEstimator()
    long.learn(step(16, 0))
    short.learn(step(1, 0))
    assert chances(long, SIGNALS) == chances(short, SIGNALS)


def test_a_request_whose_draft_is_sure_and_wrong_is_believed_less_and_the_next_one_hardly() -> None:
    model = AcceptanceEstimator()
    fresh = chances(model, SIGNALS)[0][0]
    for _ in range(6):
        model.learn(step(4, 0, confidence=0.97))
    after = chances(model, SIGNALS)[0][0]
    model.learn(step(4, 2, is_prefill=True))
    following = chances(model, SIGNALS)[0][0]
    assert after < 0.8 * fresh
    assert after < following < fresh


def test_chances_become_true_of_a_pair_that_the_weights_are_wrong_about() -> None:
    rng = random.Random(0)
    model = AcceptanceEstimator()
    said: dict[float, list[float]] = {0.3: [], 0.95: []}
    for number in range(3000):
        confidence = rng.choice((0.3, 0.95))
        # The draft means the opposite of what this pair's usually does, half the way.
        right = {0.3: 0.5, 0.95: 0.7}[confidence]
        accepted = 0
        while accepted < 3 and rng.random() < right:
            accepted += 1
        record = step(3, accepted, confidence=confidence)
        if number >= 1000:
            model.reset()
            said[confidence].append(model.update(first(record.signals, 1))[0])
        model.learn(record)
    assert sum(said[0.3]) / len(said[0.3]) == pytest.approx(0.5, abs=0.1)
    assert sum(said[0.95]) / len(said[0.95]) == pytest.approx(0.7, abs=0.1)
