"""Replay of batches, and of one text with records that come late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from experiments.policies.batch_replay import BatchCosts, replay_batch
from experiments.policies.replay import ReplayText, merge_runs, replay
from spec_stack.controller.base import Policy, StepContext, StepRecord
from spec_stack.controller.simple import Fixed
from tests.support.controller_data import COSTS, Greedy
from tests.support.reference_controller import fixed_gamma_steps

BATCH_COSTS = BatchCosts(0.01, 0.001, 0.03, 0.002)


def _texts(num_texts: int = 6) -> list[ReplayText]:
    return merge_runs([record for seed in range(num_texts) for record in Greedy(seed).record(f"text-{seed}", 4)]).texts


@dataclass
class Spy(Policy):
    """Notes, before every choice, which steps it has been told of."""

    told: list[int] = field(default_factory=list)
    seen: list[tuple[int, int, StepRecord | None, int]] = field(default_factory=list)

    def choose(self, context: StepContext) -> int:
        self.seen.append((context.step, max(self.told, default=-1), context.last, context.lag))
        return 3

    def observe(self, record: StepRecord) -> None:
        self.told.append(record.step)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_policy_knows_no_step_that_is_younger_than_the_lag(lag: int) -> None:
    text = _texts()[0]
    alone, beside = Spy(), Spy()
    score = replay(text, alone, COSTS, lag=lag)
    replay_batch([text] * 3, beside, BATCH_COSTS, 1, lag=lag)
    for spy in (alone, beside):
        for step, newest, last, said in spy.seen:
            assert newest == max(step - lag, -1)
            assert (last is None) == (newest < 0)
            assert last is None or last.step == newest
            assert said == lag
    assert len(alone.told) == score.num_steps
    assert score.num_tokens == text.end


def test_a_lag_changes_no_step_of_a_policy_that_looks_at_none() -> None:
    text = _texts()[0]
    assert replay(text, Fixed(4), COSTS, lag=2) == replay(text, Fixed(4), COSTS)


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_a_batch_of_one_takes_the_steps_that_decoding_would(gamma: int) -> None:
    text = _texts()[0]
    steps = fixed_gamma_steps(list(text.correct), text.start, text.end, gamma, reserve=0)
    score = replay_batch([text], Fixed(gamma), BATCH_COSTS, 1)
    assert score.gammas == [gamma] * len(steps)
    assert score.num_tokens == text.end - text.start
    draft_s = max(gamma - 1, 0) * 0.01 + 0.01 + 0.001 * gamma
    assert score.seconds == pytest.approx(len(steps) * (draft_s + 0.03 + 0.002 * gamma))


def test_requests_of_a_batch_go_at_their_own_pace_and_the_next_takes_a_place_at_once() -> None:
    """By another route: every request's own steps at a fixed gamma, laid side by side."""
    texts = _texts(6)
    lengths = [len(fixed_gamma_steps(list(text.correct), text.start, text.end, 4, reserve=0)) for text in texts]
    ends, waiting = sorted(lengths[:2]), lengths[2:]
    while waiting:
        ends = sorted([ends[0] + waiting.pop(0), *ends[1:]])
    assert len(replay_batch(texts, Fixed(4), BATCH_COSTS, 2).gammas) == ends[0]


def test_what_cannot_be_replayed_is_refused() -> None:
    texts = _texts()
    with pytest.raises(ValueError, match="lag"):
        replay_batch(texts, Fixed(1), BATCH_COSTS, 2, lag=0)
    with pytest.raises(ValueError, match="lag"):
        replay(texts[0], Fixed(1), COSTS, lag=0)
    with pytest.raises(ValueError, match="batch_size"):
        replay_batch(texts, Fixed(1), BATCH_COSTS, 0)
    with pytest.raises(ValueError, match="precision"):
        replay_batch([], Fixed(1), BATCH_COSTS, 1)
    with pytest.raises(ValueError, match="costs"):
        BatchCosts(-1, 0, 1, 0)
