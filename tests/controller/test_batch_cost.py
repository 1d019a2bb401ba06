"""What a server's steps take, learned from the steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spec_stack.controller.batch_cost import StepSeconds
from tests.support.step_seconds_reference import expected_seconds

GAMMAS = (0, 1, 2, 4, 8)


def _run(seconds: StepSeconds, number: int, size: int, gamma: int, took: float, num_slots: int = 0) -> None:
    seconds.begin(number, size, size, num_slots)
    seconds.observe(number, gamma, took / size)


def _true(gamma: int, size: int) -> float:
    return 0.01 * (1 + 0.3 * gamma + 0.05 * size * (gamma + 1))


def test_steps_one_by_one_say_what_all_of_them_say_at_once() -> None:
    rng, seconds, steps = random.Random(0), StepSeconds(GAMMAS), []
    for number in range(60):
        gamma, size, num_slots = rng.choice(GAMMAS), rng.choice((1, 3, 4, 7)), rng.choice((512, 800, 3_000, 50_000))
        took = _true(gamma, size) * (1 + 0.02 * rng.random())
        before = seconds.num_seen
        _run(seconds, number, size, gamma, took, num_slots)
        if seconds.num_seen > before:
            steps.append((gamma, size, num_slots, took))
    assert 30 < len(steps) < 60, "the first step of every shape is left out"
    for size, num_slots in ((1, 512), (3, 5_000), (6, 40_000)):
        reference = expected_seconds(steps, GAMMAS, size, num_slots)
        assert seconds.expected(size, num_slots) == pytest.approx(reference, rel=1e-6)


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


def test_what_lengths_take_is_known_apart_when_they_come_in_turn() -> None:
    """Of short texts a token more costs little, of long ones much: what is known of one holds when the other ends."""

    def true(gamma: int, num_slots: int) -> float:
        return 0.01 * (1 + 0.3 * gamma + num_slots / 4_000 * (1 + gamma))

    seconds, number = StepSeconds(GAMMAS), 0
    for _ in range(6):
        for num_slots in (1_000, 16_000):
            for _ in range(40):
                gamma = GAMMAS[number % 5]
                _run(seconds, number, 4, gamma, true(gamma, num_slots), num_slots)
                number += 1
    for num_slots in (1_000, 16_000):
        expected = [true(gamma, num_slots) for gamma in GAMMAS]
        assert seconds.expected(4, num_slots) == pytest.approx(expected, rel=0.1)


def test_a_length_that_nobody_counts_is_a_short_one() -> None:
    seconds = StepSeconds(GAMMAS)
    for number in range(40):
        _run(seconds, number, 4, GAMMAS[number % 5], _true(GAMMAS[number % 5], 4), 512)
    assert seconds.expected(4) == pytest.approx(seconds.expected(4, 100))
    assert seconds.doubt(4, 0, 100_000)[4] > seconds.doubt(4, 0)[4]
