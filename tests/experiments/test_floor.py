"""The floor by simulation, where costs are known exactly: no case of the default policy loses more than two percent."""

from __future__ import annotations

import pytest

from experiments.policies.simulate_floor import CASES, over_plain


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
