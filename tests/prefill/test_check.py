"""The ladder of keep rates under the draft's check, and what it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.attention import Parts, run
from spec_stack.prefill.check import DraftAnswer, checked_selection, mean_divergence, told
from spec_stack.types import Selection, TriedRate

NUM_TOKENS = 100
CONFIG = PrefillConfig(keep_rate=0.1, max_divergence=0.1, check_rates=(0.2, 0.4))


def by(config: PrefillConfig) -> Selection:
    positions = range(NUM_TOKENS - round(config.rate_for(NUM_TOKENS) * NUM_TOKENS), NUM_TOKENS)
    return Selection(positions, positions, NUM_TOKENS)


def everything() -> Selection:
    return Selection(range(NUM_TOKENS), range(NUM_TOKENS), NUM_TOKENS)


def chosen(
    config: PrefillConfig,
    select: Callable[[PrefillConfig], Selection],
    found: Callable[[Selection], float],
    prunes: bool = True,
) -> Selection:
    """By a check of two parts."""

    def check(selection: Selection) -> Parts[float]:
        yield
        return found(selection)

    return run(checked_selection(config, NUM_TOKENS, select, everything, check, prunes))


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ([0.1], 0.1),
        ([0.11, 0.0], 0.2),
        ([9.0, 0.2, 0.05], 0.4),
        ([0.2, 0.2, 0.2], 1.0),
        ([math.nan, math.inf, 0.0], 0.4),
    ],
)
def test_the_first_rate_under_which_the_answer_holds_is_kept(found: list[float], kept: float) -> None:
    left = iter(found)
    selection = chosen(CONFIG, by, lambda each: next(left))
    assert selection.keep_rate == kept
    assert [each.keep_rate for each in selection.tried] == [0.1, 0.2, 0.4][: len(found)]
    assert next(left, None) is None


def test_a_given_rate_is_tried_first_and_none_below_it() -> None:
    rates: list[float] = []
    config = PrefillConfig(keep_rate=0.3, max_divergence=0, check_rates=(0.2, 0.4))
    chosen(config, by, lambda each: rates.append(each.keep_rate) or 1.0)
    assert rates == [0.3, 0.4]


def test_infinity_reports_alone() -> None:
    config = PrefillConfig(keep_rate=0.1, max_divergence=math.inf)
    selection = chosen(config, by, lambda each: 50.0)
    assert (selection.keep_rate, *selection.tried) == (0.1, TriedRate(0.1, 50.0))


def test_what_is_whole_needs_no_check() -> None:
    selection = chosen(CONFIG, lambda config: everything(), lambda each: 1 / 0)
    assert selection.tried == ()


def test_a_turn_that_prunes_nothing_tries_its_selection_and_then_everything() -> None:
    half = Selection(range(50, 100), range(50, 100), NUM_TOKENS)
    selection = chosen(CONFIG, lambda config: half, lambda each: 1.0, prunes=False)
    assert (selection.keep_rate, *selection.tried) == (1.0, TriedRate(0.5, 1.0))


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    torch.manual_seed(0)
    whole, part = (torch.randn(4, 9).log_softmax(-1) for _ in range(2))
    rows = [
        sum(math.exp(one) * (one - other) for one, other in zip(*pair, strict=True))
        for pair in zip(whole.tolist(), part.tolist(), strict=True)
    ]
    assert mean_divergence(whole, part) == pytest.approx(sum(rows) / 4, rel=1e-5)
    padded = [torch.nn.functional.pad(each, (0, 3), value=-math.inf) for each in (whole, part)]
    assert mean_divergence(*padded) == pytest.approx(sum(rows) / 4, rel=1e-5)


def test_the_reason_says_what_was_tried() -> None:
    tried = [TriedRate(0.1, 0.83), TriedRate(0.2, 0.02)]
    assert told([], True, "on: long") == "on: long"
    assert told(tried[:1], True, "on: long") == "on: long; the draft's answer changed by 0.83 nats a token"
    assert told(tried, True, "on: long") == ("on: long; 0.2 kept: the draft's answer changed, 0.83 nats a token at 0.1")
    assert told(tried, False, "on: long") == (
        "off: the draft's answer changed, 0.83 nats a token at 0.1, 0.02 nats a token at 0.2"
    )


class Counting:
    """A model over the ids below 50 that says the next number, or the prompt's length where it has read more."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.lengths: list[int] = []

    @property
    def num_cached(self) -> int:
        return len(self.read)

    next_position = num_cached

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        self.read += token_ids
        self.lengths.append(len(token_ids))
        return torch.nn.functional.one_hot((torch.tensor(self.read[-num_logits:]) + 1) % 50, 50) * 9.0

    def rollback(self, num_tokens: int) -> None:
        del self.read[len(self.read) - num_tokens :]


@pytest.mark.parametrize(("end_ids", "answer"), [((), [*range(20, 30)]), ((23,), [20, 21, 22, 23])])
def test_an_answer_in_parts_is_the_whole_one(end_ids: tuple[int, ...], answer: list[int]) -> None:
    draft, part = Counting(), Counting()
    draft.forward(range(20), range(20), 1)
    found = run(DraftAnswer.drafted(draft, range(20), 10, end_ids))
    assert (found.token_ids, draft.read) == (answer, [*range(20), *answer[:-1]])
    # The prompt's last token runs again, and then the answer's one by one.
    assert draft.lengths[1:] == [1] * len(answer)
    kept = [3, 5, 6, 7, 19]
    rows = run(found.under(part, kept, kept, 20, lambda: 2))
    assert part.read == [*kept, *answer[:-1]]
    assert part.lengths == [2, 2, len(answer)]
    assert torch.equal(rows, run(found.under(Counting(), kept, kept, 20)))
    assert torch.equal(rows, found.logprobs)


def test_no_part_has_more_than_four_steps_of_the_draft() -> None:
    draft, num_steps = Counting(), list[int]()
    work = DraftAnswer.drafted(draft, range(20), 14, ())
    for _ in work:
        num_steps.append(len(draft.lengths))
    assert [after - before for before, after in pairwise([0, *num_steps, 14])] == [1, 4, 4, 4, 1]


@pytest.mark.parametrize(
    "options",
    [{"max_divergence": -0.1}, {"check_tokens": 0}, {"check_rates": (0.4, 0.2)}, {"check_rates": (0.5, 1.0)}],
)
def test_a_bad_value_is_named(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PrefillConfig(**options)  # type: ignore[arg-type]
