"""The live comparison of a server's policies: what its arms ask for, and how a gamma is put beside what was known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from experiments.policies.policy_cost import measure, seconds_a_step
from experiments.serving.batch_policies import PLAIN, arms_of, follows_signals, parse_args
from spec_stack.controller.base import Policy, StepContext, StepRecord


def test_an_arm_stands_for_plain_decoding_every_gamma_and_every_policy() -> None:
    arms = arms_of((2, 4), ["speckv"])
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


@dataclass
class Counting(Policy):
    """Drafts two tokens, and keeps what it is asked and told."""

    contexts: list[StepContext] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    name = "counting"

    def choose(self, context: StepContext) -> int:
        self.contexts.append(context)
        return 2

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def test_what_is_timed_is_a_step_of_a_whole_batch_with_every_requests_record() -> None:
    policy = Counting()
    seconds_a_step(policy, num_requests=3, num_steps=5, seed=0)
    assert [len(context.members) for context in policy.contexts] == [3] * 10
    assert [context.last for context in policy.contexts[:2]] == [None, policy.records[2]]
    assert len(policy.records) == 30
    assert {record.request_id for record in policy.records} == {"0", "1", "2"}
    assert all(record.gamma == len(record.signals) == 2 >= record.num_accepted for record in policy.records)


def test_every_policy_is_timed_at_every_size() -> None:
    found = measure(["fixed", "ema"], [1, 8], num_steps=2, repeats=3)
    assert {name: set(row) for name, row in found.items()} == {"fixed": {1, 8}, "ema": {1, 8}}
    assert all(0 <= cell["least"] <= cell["median"] <= cell["most"] for row in found.values() for cell in row.values())
