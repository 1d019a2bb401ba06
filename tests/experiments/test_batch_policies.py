"""The live comparison of a server's policies: what its arms ask for, and how a gamma is put beside what was known."""

from __future__ import annotations

import pytest

from experiments.policies.policy_cost import measure
from experiments.serving.batch_policies import PLAIN, arms_of, follows_signals, parse_args
from spec_stack.sglang.server_args import ServerConfig


def test_an_arm_stands_for_plain_decoding_every_gamma_and_every_policy() -> None:
    arms = arms_of(ServerConfig(gammas=(0, 2, 4)), ["speckv"])
    asked = {name: arm.custom for name, arm in arms.items()}
    expected = {PLAIN: {"gamma": 0}, "fixed-2": {"gamma": 2}, "fixed-4": {"gamma": 4}, "speckv": {"policy": "speckv"}}
    assert asked == expected


def test_a_gamma_stands_beside_the_newest_proposal_that_was_known() -> None:
    confidences = [[0.9, 0.7], [0.2], [], [0.5]]
    # Step 2 knew of step 0, step 3 of step 2, which proposed nothing.
    pairs = follows_signals([4, 4, 8, 2], [2, 2, 2, 1], confidences)
    assert pairs == [(pytest.approx(0.8), 8)]
    assert follows_signals([4, 1], [1, 1], confidences) == [(pytest.approx(0.8), 1)]


def test_too_little_to_compare_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--at-once", "0"])
    assert "--at-once" in capsys.readouterr().err


def test_a_policys_cost_grows_with_what_it_looks_at() -> None:
    found = measure(["fixed", "speckv"], [1, 8], num_steps=20, repeats=3)
    assert found["speckv"][8]["median"] > found["fixed"][8]["median"]
    assert found["speckv"][8]["median"] > found["speckv"][1]["least"]
