from __future__ import annotations

import math
import random

import pytest
from sklearn.metrics import roc_auc_score

from experiments.quality.harm_signals import analyse, auc, leave_one_out, within_kinds


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
