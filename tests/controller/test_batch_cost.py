"""What a server's steps take, learned from the steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spec_stack.controller.batch_cost import StepSeconds
from tests.support.step_seconds_reference import expected_seconds

GAMMAS = (0, 1, 2, 4, 8)


def _run(seconds: StepSeconds, number: int, size: int, gamma: int, took: float) -> None:
    seconds.begin(number, size, size)
    seconds.observe(number, gamma, took / size)


def _true(gamma: int, size: int) -> float:
    return 0.01 * (1 + 0.3 * gamma + 0.05 * size * (gamma + 1))


def test_steps_one_by_one_say_what_all_of_them_say_at_once() -> None:
    rng, seconds, steps = random.Random(0), StepSeconds(GAMMAS), []
    for number in range(60):
        gamma, size = rng.choice(GAMMAS), rng.choice((1, 3, 4, 7))
        took = _true(gamma, size) * (1 + 0.02 * rng.random())
        before = seconds.num_seen
        _run(seconds, number, size, gamma, took)
        if seconds.num_seen > before:
            steps.append((gamma, size, took))
    assert 30 < len(steps) < 60, "the first step of every shape is left out"
    for size in (1, 3, 6):
        assert seconds.expected(size) == pytest.approx(expected_seconds(steps, GAMMAS, size), rel=1e-6)


def test_what_was_measured_long_ago_is_compared_as_it_would_be_now() -> None:
    """All steps become half as slow again, and one gamma alone is seen to."""
    seconds = StepSeconds(GAMMAS)
    for number in range(100):
        gamma = GAMMAS[number % 5]
        _run(seconds, number, 4, gamma, _true(gamma, 4))
    before = seconds.expected(4)
    assert before == pytest.approx([_true(gamma, 4) for gamma in GAMMAS], rel=0.05)
    for number in range(100, 200):
        _run(seconds, number, 4, 2, 1.5 * _true(2, 4))
    assert seconds.expected(4) / before == pytest.approx(np.full(5, 1.5), rel=0.1)


def test_steps_of_one_size_say_something_of_the_next_and_less_of_far_ones() -> None:
    seconds = StepSeconds(GAMMAS)
    for number in range(40):
        _run(seconds, number, 4, GAMMAS[number % 5], _true(GAMMAS[number % 5], 4))
    known, next_size, far = (seconds.doubt(size, 3)[0] for size in (4, 8, 256))
    assert known < next_size < far
    assert seconds.doubt(4, 3)[3] == 0


def test_one_stall_moves_little() -> None:
    seconds = StepSeconds(GAMMAS)
    for number in range(50):
        _run(seconds, number, 4, GAMMAS[number % 5], _true(GAMMAS[number % 5], 4))
    before = seconds.expected(4)
    _run(seconds, 50, 4, 2, 100.0)
    assert seconds.expected(4) == pytest.approx(before, rel=0.2)


def test_a_profile_is_believed_until_steps_say_otherwise() -> None:
    profile = {size: {gamma: _true(gamma, size) for gamma in GAMMAS} for size in (1, 2, 4, 8)}
    seconds = StepSeconds(GAMMAS, profile)
    for size in (1, 3, 8):
        assert seconds.expected(size) == pytest.approx([_true(gamma, size) for gamma in GAMMAS], rel=0.1)
    for number in range(200):
        gamma = GAMMAS[number % 5]
        _run(seconds, number, 4, gamma, 0.02 * (1 + gamma))
    assert seconds.expected(4) == pytest.approx([0.02 * (1 + gamma) for gamma in GAMMAS], rel=0.15)
