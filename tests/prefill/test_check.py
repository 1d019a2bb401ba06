"""The ladder of keep rates under the check, and the attention that is dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.check import checked_selection, dropped_attention, told
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.types import Selection, TriedRate
from tests.support import reference_check

NUM_TOKENS = 100
CONFIG = PrefillConfig(keep_rate=0.1, max_dropped_attention=0.3, check_rates=(0.2, 0.4))


def by(config: PrefillConfig) -> Selection:
    positions = range(NUM_TOKENS - round(config.rate_for(NUM_TOKENS) * NUM_TOKENS), NUM_TOKENS)
    return Selection(positions, positions, NUM_TOKENS)


def everything() -> Selection:
    return Selection(range(NUM_TOKENS), range(NUM_TOKENS), NUM_TOKENS)


def chosen(
    config: PrefillConfig,
    select: Callable[[PrefillConfig], Selection],
    dropped: Callable[[Selection], float],
    prunes: bool = True,
) -> Selection:
    return checked_selection(config, NUM_TOKENS, select, everything, dropped, prunes)


@pytest.mark.parametrize(
    ("found", "kept"),
    [([0.3], 0.1), ([0.31, 0.0], 0.2), ([0.9, 0.5, 0.25], 0.4), ([0.8, 0.6, 0.4], 1.0)],
)
def test_the_first_rate_that_drops_little_is_kept(found: list[float], kept: float) -> None:
    left = iter(found)
    selection = chosen(CONFIG, by, lambda each: next(left))
    assert selection.keep_rate == kept
    assert [each.keep_rate for each in selection.tried] == [0.1, 0.2, 0.4][: len(found)]
    assert [each.dropped_attention for each in selection.tried] == found
    assert next(left, None) is None


def test_a_given_rate_is_tried_first_and_none_below_it() -> None:
    rates: list[float] = []
    config = PrefillConfig(keep_rate=0.3, max_dropped_attention=0, check_rates=(0.2, 0.4))
    chosen(config, by, lambda each: rates.append(each.keep_rate) or 1.0)
    assert rates == [0.3, 0.4]


def test_one_reports_alone_and_none_checks_nothing() -> None:
    config = PrefillConfig(keep_rate=0.1, max_dropped_attention=1)
    selection = chosen(config, by, lambda each: 1.0)
    assert (selection.keep_rate, *selection.tried) == (0.1, TriedRate(0.1, 1.0))
    assert chosen(PrefillConfig(keep_rate=0.1), by, lambda each: 1 / 0).tried == ()


def test_what_is_whole_needs_no_check() -> None:
    assert chosen(CONFIG, lambda config: everything(), lambda each: 1 / 0).tried == ()


def test_a_turn_that_prunes_nothing_tries_its_selection_and_then_everything() -> None:
    half = Selection(range(50, 100), range(50, 100), NUM_TOKENS)
    selection = chosen(CONFIG, lambda config: half, lambda each: 1.0, prunes=False)
    assert (selection.keep_rate, *selection.tried) == (1.0, TriedRate(0.5, 1.0))


def inputs_of(attention: torch.Tensor) -> ScoringInputs:
    """A prompt of 100 tokens, of which 60 to 69 are kept anyway."""
    return ScoringInputs(PromptText(range(NUM_TOKENS), protected=((60, 70),)), answer_attention=attention)


def test_dropped_attention_is_that_of_loops() -> None:
    torch.manual_seed(0)
    attention, config = torch.rand(NUM_TOKENS), PrefillConfig(chunk_size=8, keep_last=2)
    seen = [*range(5, 30), *range(80, 90)]
    expected = reference_check.dropped_attention(attention.tolist(), seen, range(60, 70), first=8, last=16)
    found = dropped_attention(inputs_of(attention), seen, config)
    assert 0.3 < found < 0.95
    assert found == pytest.approx(expected)


def test_nothing_is_dropped_where_all_is_seen_and_all_where_the_answer_attends_to_nothing() -> None:
    config = PrefillConfig(chunk_size=8)
    assert dropped_attention(inputs_of(torch.ones(NUM_TOKENS)), range(NUM_TOKENS), config) == 0
    assert dropped_attention(inputs_of(torch.zeros(NUM_TOKENS)), range(50), config) == 1
    with pytest.raises(ValueError, match="attention of the draft's answer is missing"):
        dropped_attention(ScoringInputs(PromptText(range(NUM_TOKENS))), [], config)


def test_the_reason_says_what_was_tried() -> None:
    tried = [TriedRate(0.1, 0.83), TriedRate(0.2, 0.02)]
    assert told([], True, "on: long") == "on: long"
    assert told(tried[:1], True, "on: long") == "on: long; 0.83 of the draft's attention is dropped"
    assert told(tried, True, "on: long") == (
        "on: long; 0.2 kept: too much of the draft's attention would be dropped, 0.83 at 0.1"
    )
    assert told(tried, False, "on: long") == (
        "off: too much of the draft's attention would be dropped, 0.83 at 0.1, 0.02 at 0.2"
    )
