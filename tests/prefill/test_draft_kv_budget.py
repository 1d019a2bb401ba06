"""Which part of a long text a draft sees, chosen by words."""

from __future__ import annotations

import time

import numpy as np
import pytest

from spec_stack.prefill.draft_kv_budget import MOST_RESTORED, DraftKVBudget, choose_slots
from tests.support.models import random_prompt
from tests.support.reference_slots import chosen_slots


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "size"), [(300, 64, 8), (1000, 128, 32), (999, 130, 7), (90, 90, 8)]
)
def test_the_slots_are_those_of_a_plain_loop(num_tokens: int, num_slots: int, size: int, seed: int) -> None:
    # Words of all rarities.
    text = [min(token, 5 + token % 40) for token in random_prompt(num_tokens, seed, vocab=200)]
    assert choose_slots(text, num_slots, size, size) == chosen_slots(text, num_slots, size, size)


def test_the_choice_in_a_long_text_takes_milliseconds() -> None:
    text = random_prompt(128_000, vocab=5000)
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        choose_slots(text, 512, 32, 32)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 1


def test_a_renewal_recalls_a_bounded_number_of_slots_and_all_unread_text() -> None:
    budget = DraftKVBudget(200, lambda text_ids, num_slots: range(100, 100 + num_slots))
    cached = np.array([0, 1, *range(100, 110)])
    stays, missing = budget.renew(range(300), cached, num_read=280)
    assert cached[stays].tolist() == list(range(100, 110))
    assert missing.tolist() == [*range(110, 110 + MOST_RESTORED), *range(280, 300)]
