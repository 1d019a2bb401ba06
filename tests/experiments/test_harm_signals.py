from __future__ import annotations

import math
import random

import pytest
from sklearn.metrics import roc_auc_score

from experiments.quality.harm_signals import analyse, auc, floor_gain, floors, leave_one_out, within_kinds


def test_the_area_is_that_of_scikit_learn_ties_included() -> None:
    rng = random.Random(0)
    values = [rng.randint(0, 5) for _ in range(80)]
    harmed = [rng.random() < 0.3 + 0.08 * value for value in values]
    assert auc(values, harmed) == pytest.approx(roc_auc_score(harmed, values))
    assert math.isnan(auc([1.0, 2.0], [True, True]))


def test_a_signal_that_only_tells_kinds_apart_is_worth_nothing_within_them() -> None:
    rng = random.Random(1)
    kinds = ["easy"] * 200 + ["hard"] * 200
    harmed = [rng.random() < (0.1 if kind == "easy" else 0.8) for kind in kinds]
    values = [rng.random() + (1.0 if kind == "hard" else 0.0) for kind in kinds]
    assert auc(values, harmed) > 0.75
    assert within_kinds(values, harmed, kinds)[0] == pytest.approx(0.5, abs=0.1)
    report = analyse([{"kind": value} for value in values], harmed, kinds)
    assert report["signals"]["kind"]["pooled"] > 0.75
    assert report["worth_an_option"] == []


def test_a_signal_that_tells_harm_apart_is_found_also_on_kinds_it_was_not_fitted_to() -> None:
    rng = random.Random(2)
    kinds = [kind for kind in "abc" for _ in range(80)]
    harmed = [rng.random() < 0.4 for _ in kinds]
    # With an offset by kind, and the wrong way round.
    rows = [
        {"signal": ord(kind) - bad + 0.4 * rng.random(), "noise": rng.random()}
        for kind, bad in zip(kinds, harmed, strict=True)
    ]
    report = analyse(rows, harmed, kinds)
    assert report["signals"]["signal"]["within"] > 0.95
    assert report["signals"]["signal"]["interval"][0] > 0.9
    assert "signal" in report["worth_an_option"]
    assert abs(report["signals"]["noise"]["within"] - 0.5) < 0.1
    scores = leave_one_out(rows, harmed, kinds)
    assert within_kinds(scores, harmed, kinds)[0] > 0.9


def test_leaving_a_kind_out_needs_both_labels_in_the_others() -> None:
    rows = [{"signal": float(index)} for index in range(6)]
    harmed = [True, False, True, False, False, False]
    assert leave_one_out(rows, harmed, ["a"] * 4 + ["b"] * 2)[:4] == [0.0] * 4


def test_a_direction_that_was_learned_is_not_turned_in_the_signals_favour() -> None:
    rng = random.Random(3)
    harmed = [rng.random() < 0.5 for _ in range(100)]
    rows = [{"signal": float(not bad)} for bad in harmed]
    favoured = analyse(rows, harmed, ["a"] * 100)["signals"]["signal"]
    assert (favoured["turned"], favoured["within"]) == (True, 1.0)
    wrong = analyse(rows, harmed, ["a"] * 100, {"signal": False})
    assert wrong["signals"]["signal"]["within"] == 0.0
    assert wrong["worth_an_option"] == []


def test_a_floor_gains_what_it_removes_beyond_chance_of_the_same_kinds() -> None:
    kinds, kl = ["a"] * 4 + ["b"] * 4, [4.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    knows = floor_gain([1.0, 0, 0, 0, 0, 0, 0, 0], 0.5, kl, kinds)
    assert (knows["dense"], knows["kl_removed"], knows["by_chance"]) == (0.125, 0.5, 0.125)
    # All of one kind: what it removes, any choice by kind would.
    tells_kinds = floor_gain([1.0] * 4 + [0.0] * 4, 0.5, kl, kinds)
    assert tells_kinds["kl_removed"] == 0.5
    assert tells_kinds["gain"] == 0.0
    assert tells_kinds["interval"] == (0.0, 0.0)


def test_a_floors_line_is_that_of_the_learned_prompts() -> None:
    def row(value: float) -> dict[str, object]:
        return {"signals": {"signal": value}, "kl": 1.0, "kind": "a"}

    learned, rows = [row(value) for value in (0.0, 1.0, 2.0, 3.0)], [row(2.5), row(0.1), row(0.2), row(0.3)]
    assert floors(rows, learned, {"signal": False})["signal"]["0.5"]["dense"] == 0.25
    assert floors(rows, learned, {"signal": True})["signal"]["0.5"]["dense"] == 0.75
