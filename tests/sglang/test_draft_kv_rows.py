"""A row's slots hold what they are said to hold, in the order of writing, and never more than a row has."""

from __future__ import annotations

import numpy as np
import pytest

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_kv_budget import (
    MOST_RESTORED,
    RENEW_EVERY,
    RENEW_WHERE_WRONG,
    DraftKVBudget,
    choose_slots,
)
from spec_stack.sglang.draft_kv_rows import DraftKVRow, num_row_slots

CONFIG = PrefillConfig(draft_kv_budget=96, chunk_size=16)
MAX_GAMMA = 4


class WrittenSlots:
    """Slow reference: what every slot holds, told by following each write."""

    def __init__(self, num_prompt_tokens: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        # Few words, so that chunks share them with what is written, and others at other times.
        self.text = self.rng.integers(0, 60, num_prompt_tokens + 1)
        self.row = DraftKVRow(1000 + self.rng.permutation(num_row_slots(CONFIG, MAX_GAMMA)), DraftKVBudget.of(CONFIG))
        self.positions: dict[int, int] = {}
        self._write(0, self.row.begin(self.text[:-1]).tolist())

    def _write(self, place: int, positions: list[int]) -> None:
        for at, position in enumerate(positions):
            self.positions[int(self.row.slots[place + at])] = position

    @property
    def num_used(self) -> int:
        """As the engine counts it: by the target's length and the shift alone."""
        return len(self.text) - self.row.shift

    @property
    def in_use(self) -> list[int]:
        return [self.positions[int(slot)] for slot in self.row.slots[: self.num_used]]

    def step(self) -> None:
        """Draft as far as may be, accept some of it, and one token more."""
        place, length = self.num_used, len(self.text)
        self._write(place, list(range(length, length + MAX_GAMMA + 1)))
        num_new = int(self.rng.integers(1, MAX_GAMMA + 2))
        self.text = np.append(self.text, self.rng.integers(0, 60, num_new))

    def renew(self, num_known: int) -> int:
        recalled = self.row.renew(self.text[:num_known]).tolist()
        self._write(self.row.num_used - len(recalled), recalled)
        return len(recalled)


@pytest.mark.parametrize("num_prompt_tokens", [1, 90, 2 * 96, 2 * 96 + 1, 3000])
@pytest.mark.parametrize("lag", [0, 2 * (MAX_GAMMA + 1)])
def test_the_row_reads_chosen_positions_and_all_that_the_host_does_not_know_yet(
    num_prompt_tokens: int, lag: int
) -> None:
    written = WrittenSlots(num_prompt_tokens, seed=num_prompt_tokens)
    slots = sorted(written.row.slots.tolist())
    num_renewals = num_restored = 0
    for step in range(200):
        known = max(num_prompt_tokens, len(written.text) - lag)
        if written.row.is_due(known, is_wrong=step % 50 < 10):
            before = set(written.in_use)
            num_back = written.renew(known)
            chosen = set(choose_slots(written.text[:known], 96, 16, 16))
            newest = set(range(known, len(written.text)))
            in_use = set(written.in_use)
            assert before & chosen <= in_use <= chosen | newest
            assert newest <= in_use
            assert num_back <= MOST_RESTORED
            num_renewals, num_restored = num_renewals + 1, num_restored + num_back
        now = written.in_use
        assert len(set(now)) == len(now)
        assert len(written.text) - 1 in now
        assert sorted(written.row.slots.tolist()) == slots
        assert written.num_used + MAX_GAMMA + 1 <= len(slots)
        written.step()
    assert num_renewals >= 200 / RENEW_EVERY
    assert num_restored > 0


def test_a_text_that_the_slots_hold_is_held_whole_and_a_longer_one_is_not() -> None:
    assert WrittenSlots(96, seed=1).in_use == list(range(96 + 1))
    longer = WrittenSlots(150, seed=1).in_use
    assert len(longer) <= 96 + 1
    assert longer != list(range(len(longer)))


def test_a_row_that_was_not_begun_is_never_chosen_anew() -> None:
    row = DraftKVRow(np.arange(8), DraftKVBudget.of(CONFIG))
    assert row.shift == 0
    assert not row.is_due(1_000_000, is_wrong=True)


def test_slots_are_chosen_anew_sooner_where_half_of_a_proposal_was_wrong() -> None:
    written = WrittenSlots(2 * 96 + 10, seed=1)
    num_tokens = len(written.text)
    for is_wrong, pace in ((True, RENEW_WHERE_WRONG), (False, RENEW_EVERY)):
        assert not written.row.is_due(num_tokens + pace - 1, is_wrong)
        assert written.row.is_due(num_tokens + pace + 1, is_wrong)
    # What is held whole is not chosen from, however wrong the draft is.
    short = WrittenSlots(50, seed=1)
    assert not short.row.is_due(96 - 1, is_wrong=True)


def test_a_request_has_the_slots_that_the_documentation_names() -> None:
    """512 chosen ones, 64 until the next choice, and five steps of gamma 8."""
    assert num_row_slots(PrefillConfig(), 8) == 621
