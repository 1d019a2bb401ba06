"""The rivals of experiments/policies/rivals: what each of them does, in replay."""

from __future__ import annotations

from experiments.policies.rivals.bandit import Bandit
from tests.support.controller_data import context, step


def test_bandit_finds_the_better_arm_and_changes_its_mind() -> None:
    policy = Bandit(gammas=(1, 8), thresholds=(0.0,), discount=0.98)

    def share_of_eight(accepted: int) -> float:
        chosen = []
        for _ in range(300):
            gamma = policy.choose(context())
            chosen.append(gamma == 8)
            policy.observe(step(gamma, min(accepted, gamma)))
        return sum(chosen[100:]) / 200

    assert share_of_eight(8) > 0.8
    assert share_of_eight(0) < 0.2
