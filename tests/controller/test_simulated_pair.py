"""The simulated pair: the library's own loop over recorded texts, on a clock of measured seconds."""

from __future__ import annotations

from typing import Any

import pytest

from spec_stack.controller.registry import make_policy
from tests.support.simulated_pair import Costs, Text, oracle_s, run_texts

COSTS = Costs({1: 1.0, 9: 1.0}, drafted_s=0.25, read_s=0.0, prefill_s=0.0)


def row(right: str, **changes: Any) -> dict[str, Any]:
    """A text whose draft is right where `right` has a 1, and knows it."""
    correct = [int(each) for each in right]
    text = list(range(100, 100 + len(right)))
    return {
        "task": "code", "prompt": [1, 2, 3], "text": text, "correct": correct,
        "draft": [token_id if ok else 7 for token_id, ok in zip(text, correct, strict=True)],
        "conf": [0.99 if ok else 0.3 for ok in correct], "ent": [0.1 if ok else 3.0 for ok in correct],
        "tails": {str(at): [[3.0] * 8, [0.3] * 8] for at, ok in enumerate(correct) if not ok},
    } | changes  # fmt: skip


@pytest.mark.parametrize(("gamma", "seconds"), [(0, 9.0), (2, 3 * 1.5), (4, 2.0 + 1.75)])
def test_a_draft_that_is_always_right_takes_what_its_steps_take(gamma: int, seconds: float) -> None:
    runs = run_texts([Text.parse(row("1" * 10))], lambda: make_policy("fixed", gamma=gamma), "model", COSTS)
    assert runs[0].decode_s == pytest.approx(seconds)


def test_tokens_behind_a_wrong_one_are_wrong_whatever_the_draft_says() -> None:
    runs = run_texts([Text.parse(row("1110111111"))], lambda: make_policy("fixed", gamma=4), "model", COSTS)
    assert [(step.gamma, step.num_accepted) for step in runs[0].steps][:2] == [(4, 2), (4, 4)]


@pytest.mark.parametrize("right", ["1111111111", "1010101010", "1111011101111011", "0000000000"])
@pytest.mark.parametrize("name", ["throughput", "fixed", "confidence"])
def test_no_policy_beats_the_oracle(right: str, name: str) -> None:
    text = Text.parse(row(right))
    assert run_texts([text], lambda: make_policy(name), "model", COSTS)[0].decode_s >= oracle_s(text, COSTS) - 1e-9


def test_the_oracle_is_plain_where_the_draft_is_never_right() -> None:
    assert oracle_s(Text.parse(row("0" * 8)), COSTS) == pytest.approx(7.0)
