"""The floor by simulation, where costs are known exactly: no case of the default policy loses more than two percent."""

from __future__ import annotations

import pytest

from experiments.policies.simulate_floor import CASES, SLOTS, over_plain, slots_over_plain


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_tokens", [24, 64, 128])
def test_a_policy_that_knows_its_draft_is_never_much_slower_than_plain_decoding(case: str, num_tokens: int) -> None:
    # The first answers, in which it gets to know it, are in this.
    assert over_plain("throughput", CASES[case], num_tokens, is_fresh=False) > 0.975


def test_a_good_draft_is_made_use_of_at_once_too() -> None:
    assert over_plain("throughput", CASES["good"], 64, is_fresh=True) > 1.4
    assert over_plain("throughput", CASES["good"], 64, is_fresh=False) > 1.6


def test_a_policy_without_a_floor_is_caught() -> None:
    assert over_plain("confidence", CASES["useless and sure"], 24, is_fresh=False) < 0.5


@pytest.mark.parametrize(
    ("case", "least"), [("0.9 right", 1.45), ("half and 0.9 right in turn", 1.15), ("useless", 0.97)]
)
def test_slots_are_read_where_whole_answers_gain_by_it(case: str, least: float) -> None:
    """One text on which the draft is no help does not end it for the next, and a useless one is seldom read."""
    assert slots_over_plain("throughput", SLOTS[case], 96)[1] > least
