"""What the rows of the check's measurement tell."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.real.checked_report import RATES, auroc, cost, is_lost, ladder, loss


def told(dropped: float, logprobs: list[float] | None, is_right: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"num_kept": 20, "dropped": dropped}
    return found if logprobs is None else found | {"sparse_s": 2.0, "logprobs": logprobs, "is_right": is_right}


def row(is_right: bool = False) -> dict[str, Any]:
    rates = (told(0.5, [-2.0, -2.0]), told(0.04, [-0.3, -0.3], True), told(0.0, None))
    given = {"own": [-0.1, -0.1], "is_right": is_right, "num_tokens": 100}
    seconds = {"scoring_s": 3.0, "look_ahead_s": 1.0, "dense_s": 10.0}
    return given | seconds | {str(rate): each for rate, each in zip(RATES, rates, strict=True)}


def test_auroc_is_the_chance_that_a_lost_case_is_higher() -> None:
    assert auroc([0.1, 0.9, 0.5], [False, True, False]) == 1
    assert auroc([0.5, 0.5], [False, True]) == 0.5
    assert auroc([0.9, 0.1, 0.5], [False, True, False]) == 0


def test_lost_is_a_right_answer_or_many_nats() -> None:
    assert loss(row(), 0.1) == pytest.approx(1.9)
    assert [is_lost(row(), rate) for rate in RATES] == [True, False, False]
    assert [is_lost(row(is_right=True), rate) for rate in RATES] == [True, False, False]


def test_the_ladder_takes_the_first_rate_under_the_threshold() -> None:
    assert ladder(row(), 0.1) == (0.2, 2)
    assert ladder(row(), -1, RATES) == (None, 3)


def test_a_refusal_costs_the_draft_and_the_whole_prompt() -> None:
    assert cost(row(), 0.2, 2) == 3 + 1 + 2
    assert cost(row(), None, 2) == 3 + 1 + 10
    assert cost(row(), 0.1) == 3 + 2
    assert cost(row(), None, 2, ratio=0.16) == pytest.approx((3 + 1) / 2 + 10)
