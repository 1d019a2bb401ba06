"""The rivals of experiments/policies/rivals: what each of them does, in replay."""

from __future__ import annotations

import random

import pytest

from experiments.policies.rivals.bandit import Bandit
from experiments.policies.rivals.batch_rivals import _SLOTS, AcceptanceAlone, SGLangAdaptive, SurvivalTrim, _Slot
from spec_stack.controller.batch_confidence import BatchConfidence
from spec_stack.offline.batch_replay import BatchCosts, replay_batch
from spec_stack.offline.replay import ReplayText, merge_runs
from tests.support.controller_data import Greedy, context, step

BATCH_COSTS = BatchCosts(0.01, 0.001, 0.03, 0.002)


def _texts(num_texts: int = 6, p_right: float = 0.8) -> list[ReplayText]:
    return merge_runs(
        [record for seed in range(num_texts) for record in Greedy(seed, p_right=p_right).record(f"text-{seed}", 4)]
    ).texts


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


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rivals_run_in_batches_late_or_not(batch_size: int) -> None:
    for lag in (1, 2):
        for policy in (AcceptanceAlone(), SGLangAdaptive(), SurvivalTrim(BATCH_COSTS), BatchConfidence()):
            score = replay_batch(_texts() * 4, policy, BATCH_COSTS, batch_size, lag=lag, max_gamma=8)
            assert score.num_tokens >= len(score.gammas)


@pytest.mark.parametrize(("p_right", "settles_on"), [(1.0, {7}), (0.0, {1})])
def test_sglangs_rule_goes_to_the_ends_of_its_candidates(p_right: float, settles_on: set[int]) -> None:
    score = replay_batch(_texts(6, p_right=p_right) * 6, SGLangAdaptive(), BATCH_COSTS, 1)
    assert set(score.gammas[60:]) == settles_on


def test_sglangs_rule_is_sglangs() -> None:
    """Against SGLang's own class, where it is installed."""
    module = pytest.importorskip("sglang.srt.speculative.adaptive_spec_params")
    for size, candidates, _ in _SLOTS:
        theirs = module.AdaptiveStepSlot(3, module.DEFAULT_ADAPTIVE_CONFIG[str(size)])
        ours = _Slot(candidates, dict((each[0], each[2]) for each in _SLOTS)[size], 3)
        rng = random.Random(size)
        for number in range(600):
            chance = 0.9 if number // 100 % 2 else 0.2
            accepted = [sum(rng.random() < chance for _ in range(ours.gamma)) for _ in range(4)]
            theirs.update(accepted)
            ours.update(accepted)
            assert ours.gamma == theirs.current_steps
