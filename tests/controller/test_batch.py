"""The policy for batches: each request's own acceptance, one gamma, by tokens over measured seconds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from spec_stack.controller.base import BatchRequest, DraftSignals, StepContext, StepRecord
from spec_stack.controller.batch import AcceptanceRates, BatchThroughput
from spec_stack.controller.registry import make_batch_policy
from tests.support.controller_data import step


def _context(number: int, *members: BatchRequest) -> StepContext:
    return StepContext(number, 8, None, "fp32", batch_size=len(members), members=members)


def _record(number: int, request_id: str, gamma: int, num_accepted: int, seconds: float) -> StepRecord:
    made = step(gamma, num_accepted, draft_s=0.0, verify_s=seconds, precision="fp32")
    return replace(made, request_id=request_id, step=number, signals=DraftSignals())


def _measured(seconds: dict[int, float]) -> BatchThroughput:
    """A policy that has observed every gamma at batch sizes 1 to 4, twice."""
    policy = BatchThroughput(gammas=tuple(seconds))
    numbers = itertools.count(-100)
    for size, gamma in itertools.product((1, 2, 4), [*seconds] * 2):
        members = tuple(BatchRequest(f"before-{at}") for at in range(size))
        number = next(numbers)
        policy.choose(_context(number, *members))
        policy.observe(_record(number, members[0].request_id, gamma, 0, seconds[gamma] / size))
    return policy


def test_one_requests_acceptance_says_little_of_another() -> None:
    """Two requests side by side, one always right, one always wrong."""
    rates = AcceptanceRates(max_gamma=8, weight=0.1)
    for _ in range(60):
        rates.observe("right", 8, 8)
        rates.observe("wrong", 8, 0)
    right, wrong = rates.expected_accepted_tokens([BatchRequest("right"), BatchRequest("wrong")])[:, 8]
    assert right > 5
    assert wrong < 1


def test_more_accepted_tokens_than_gamma_count_as_all() -> None:
    rates = AcceptanceRates(max_gamma=2, weight=0.1)
    for _ in range(60):
        rates.observe("request", 2, 4)
    assert 1.9 < rates.expected_accepted_tokens([BatchRequest("request")])[0, 2] <= 2


def test_a_batch_waits_for_its_slowest_request() -> None:
    """The gamma that is best for a request that is always right is not the batch's beside one that never is."""
    taken = {0: 1.0, 8: 2.6}
    chosen = {}
    for others in ((), ("wrong",)):
        policy = BatchThroughput(gammas=(0, 8))
        members = tuple(BatchRequest(name) for name in ("right", *others))
        for number in range(120):
            gamma = policy.choose(_context(number, *members))
            for member in members:
                num_accepted = gamma if member.request_id == "right" else 0
                seconds = taken[gamma] / len(members)
                policy.observe(_record(number, member.request_id, gamma, num_accepted, seconds))
        chosen[others] = [policy.choose(_context(number, *members)) for number in range(120, 130)]
    assert chosen[()].count(8) >= 9
    assert chosen["wrong",].count(0) >= 9


def test_no_more_is_expected_of_a_request_than_its_cap() -> None:
    expected = AcceptanceRates(max_gamma=8, weight=0.1).expected_accepted_tokens(
        [BatchRequest("a", 2), BatchRequest("b", 0)]
    )
    assert not expected[1].any()
    assert 0 == expected[0, 0] < expected[0, 1] < expected[0, 2] == expected[0, 8] <= 2


def test_the_gamma_is_that_under_which_finite_answers_end_soonest() -> None:
    """By a model without the rule: every request has as many tokens to go, at its own pace, and all wait for them."""
    rng = random.Random(3)
    for _ in range(20):
        base, slope = rng.uniform(0.5, 2), rng.uniform(0.02, 0.4)
        seconds = {gamma: base + slope * gamma for gamma in (0, 1, 2, 4, 8)}
        policy = _measured(seconds)
        rates = [rng.choice([0.2, 0.5, 0.9]) for _ in range(3)]
        members = tuple(BatchRequest(str(at)) for at in range(3))
        accepted = np.array([[sum(rate**at for at in range(1, gamma + 1)) for gamma in range(9)] for rate in rates])
        policy.expected_accepted_tokens = lambda members, found=accepted: found  # type: ignore[method-assign]
        waits = {gamma: sum(seconds[gamma] * 100 / (1 + accepted[row, gamma]) for row in range(3)) for gamma in seconds}
        assert waits[policy.choose(_context(9, *members))] < 1.1 * min(waits.values())


def test_gamma_changes_only_for_what_is_worth_a_change() -> None:
    """Two gammas, by turns the better one: by a hundredth of the wait, then by a tenth."""
    seconds = {gamma: 1.0 for gamma in (2, 4)}
    policy = _measured(seconds)
    member, better, turns = BatchRequest("a"), 0.01, itertools.count()

    def expected(members: Sequence[BatchRequest]) -> np.ndarray:
        is_turn = next(turns) % 2 == 0
        return np.array([[0, 0, 1 + better * is_turn, 1, 1 + better * (not is_turn)]])

    policy.expected_accepted_tokens = expected  # type: ignore[method-assign]

    def run(steps: range) -> list[int]:
        chosen = []
        for number in steps:
            chosen.append(policy.choose(_context(number, member)))
            policy.observe(_record(number, "a", chosen[-1], 1, 1.0))
        return chosen

    assert len(set(run(range(10, 40)))) == 1
    better = 0.2
    assert run(range(40, 60)) == [2, 4] * 10


def test_a_decision_and_what_is_learned_from_it_take_little_time() -> None:
    policy = BatchThroughput()
    members = tuple(BatchRequest(str(at)) for at in range(4))
    spent = []
    for number in range(400):
        begun = time.thread_time()
        gamma = policy.choose(_context(number, *members))
        chosen = time.thread_time() - begun
        records = [_record(number, each.request_id, gamma, gamma // 2, 0.01) for each in members]
        begun = time.thread_time()
        for record in records:
            policy.observe(record)
        spent.append(chosen + time.thread_time() - begun)
    # The median of a loaded machine, and ten times the room that an idle one needs.
    assert sorted(spent)[200] < 2e-3


@pytest.mark.parametrize(("options", "named"), [({"gammas": ()}, "gammas"), ({"weight": 0.0}, "weight")])
def test_bad_options_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BatchThroughput(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["speckv", "confidence"])
def test_a_policy_that_decides_for_one_request_names_what_a_batch_uses_instead(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown batch policy {name!r}.*throughput"):
        make_batch_policy(name)


GAMMAS = (0, 1, 2, 4, 8)


def _seconds(gamma: int, size: int) -> float:
    return 1e-2 * (1 + 0.3 * gamma + 0.01 * size * (1 + gamma))


def _observe(policy: BatchThroughput, number: int, gamma: int, size: int, seconds: float) -> None:
    members = tuple(BatchRequest(str(at)) for at in range(size))
    policy.choose(_context(number, *members))
    for member in members:
        policy.observe(_record(number, member.request_id, gamma, 0, seconds / size))


def test_seconds_are_those_measured_by_batch_size() -> None:
    rng, policy = random.Random(0), BatchThroughput(GAMMAS)
    for number in range(400):
        gamma, size = rng.choice(GAMMAS), rng.choice((1, 4))
        _observe(policy, number, gamma, size, _seconds(gamma, size) * rng.uniform(0.9, 1.1))
    for size, by_gamma in policy.step_seconds((1, 4)).items():
        assert by_gamma == pytest.approx({gamma: _seconds(gamma, size) for gamma in GAMMAS}, rel=0.1)


def test_one_stall_moves_little() -> None:
    policy = BatchThroughput(GAMMAS)
    for number, seconds in enumerate((*[0.01] * 20, 5.0)):
        _observe(policy, number, 4, 1, seconds)
    assert policy.step_seconds((1,))[1][4] < 0.0125


def test_plain_steps_quicker_than_the_drafted_ones_predict_keep_their_measured_seconds() -> None:
    """A drafted token costs little beside what any drafting costs."""
    taken = {gamma: 1 + 0.6 * (gamma > 0) + 0.02 * gamma for gamma in GAMMAS}
    policy = BatchThroughput(GAMMAS)
    for number in range(200):
        gamma = GAMMAS[number % len(GAMMAS)]
        _observe(policy, number, gamma, 1, taken[gamma])
    assert policy.step_seconds((1,))[1] == pytest.approx(taken, rel=0.05)
