"""Where what comes back is written, against a look at each slot."""

from __future__ import annotations

import random

import pytest
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.recall import recall
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import make_segments
from spec_stack.prefill.turn import Held, select_turn


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_back_is_written_last_or_in_its_place(seed: int) -> None:
    rng = random.Random(seed)
    num_cached = rng.choice([50, 400, 1500])
    dropped = sorted(rng.sample(range(num_cached), rng.randint(1, num_cached // 2)))
    held = [position for position in range(num_cached) if position not in dropped]
    restored = sorted(rng.sample(dropped, rng.randint(0, len(dropped) - 1)))
    text, left = PromptText(range(num_cached + 1)), Held(num_cached, held)
    last = select_turn(text, left, restored)
    assert (last.num_held, last.positions) == (len(held), [*restored, num_cached])
    in_text = select_turn(text, left, restored, place="in_text")
    assert [*held[: in_text.num_held], *in_text.positions] == sorted([*held, *restored, num_cached])
    assert in_text.positions[0] == [*restored, num_cached][0]
    assert (in_text.num_recalled, in_text.num_held + in_text.num_recomputed) == (len(restored), len(held))


def test_text_without_any_attention_is_not_recalled() -> None:
    config = PrefillConfig(granularity="chunks", chunk_size=8)
    importance = torch.cat([torch.zeros(64), torch.ones(16)])
    assert recall(importance, range(8), make_segments(64, None, config), config, SessionConfig()) == []


def test_protected_spans_of_a_turn_are_kept_where_they_stand_in_the_conversation() -> None:
    config = PrefillConfig(keep_rate=0.1, granularity="chunks", chunk_size=4)
    # Across the border to the new text, and within it.
    protected = [(30, 50), (90, 97)]
    inputs = ScoringInputs(PromptText(range(200), protected=protected), importance=torch.zeros(200))
    turn = select_turn(inputs.text, Held.dense(40), by=(inputs, config))
    forced = [*range(40, 44), *range(196, 200)]
    assert {*range(40, 50), *range(90, 97), *forced} <= set(turn.positions)
    assert len(turn.positions) < 50
