"""Where the question is looked for, and what its tokens count."""

from __future__ import annotations

import random

import pytest
import torch

from spec_stack.prefill.importance import Segment, over_queries
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates, question_words
from tests.support import reference_question


@pytest.mark.parametrize("seed", range(60))
def test_the_question_is_where_a_slow_reader_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    pieces: list[str] = []
    protected: list[tuple[int, int]] = []
    for turn in range(rng.randrange(0, 6)):
        begin = len(pieces)
        pieces += ["<t>"] * rng.choice([1, 3, 90 if turn == 0 else 2])
        protected.append((begin, len(pieces)))
        for _ in range(rng.randrange(0, 9)):
            pieces += ["word"] * rng.choice([1, 2, 5, 30, 150]) + [rng.choice([".", "?", "\n", "\uff1f"]), "\n"]
    pieces += ["<t>"] * rng.choice([1, 4, 12])
    protected.append((len(pieces) - rng.choice([0, 1]), len(pieces)))
    protected = protected if rng.random() < 0.8 else []
    found = find_candidates(PromptText(range(len(pieces)), pieces, protected))
    expected = reference_question.question_of(pieces, protected)
    for first in (0, *rng.sample(range(len(pieces)), k=min(4, len(pieces)))):
        new, slow = found.reaching(first), expected.since(first)
        assert [*new.segments] == [*slow.repeated, *slow.in_place]
        assert (new.num_repeated, [*new.is_question], new.opening) == (len(slow.repeated), slow.marked, slow.opening)
        assert question_words(new) == pytest.approx(slow.words())


def test_a_short_line_is_no_segment_unless_it_has_a_question_mark() -> None:
    pieces = list("abcdef\nok\nwhy?\nno?")
    found = find_candidates(PromptText(range(len(pieces)), pieces))
    assert found.segments == ((0, 7), (10, 15), (15, 18))
    assert found.is_question == (False, True, True)


def test_a_prompt_of_nothing_but_short_lines_keeps_its_segments() -> None:
    assert find_candidates(PromptText(range(3), list("a\nb"))).segments == ((0, 2), (2, 3))


def test_new_text_that_is_all_protected_holds_no_earlier_question_and_scores_by_its_own_tokens() -> None:
    pieces = ["<u>", *"where is the key?", "<a>", *"in the hall", "</a>", *"be brief!", "<a>"]
    protected = [(0, 1), (18, 19), (30, 41)]
    found = find_candidates(PromptText(range(len(pieces)), pieces, protected))
    assert found.is_question.count(True) == 1
    for first in (30, 31, 40):
        new = found.reaching(first)
        assert (new.segments, new.is_question, new.num_repeated, new.start) == ((), (), 0, first)
    assert found.reaching(41).start == 40
    assert found.reaching(29).segments == ((19, 30),)


def test_the_segment_that_counts_most_is_as_important_as_the_best_of_the_prompt() -> None:
    attention = torch.tensor([[0.0, 0.6, 0.2, 0.0, 0.0, 0.2], [0.0, 0.6, 0.2, 0.2, 0.0, 0.0]])
    segments = (Segment((0, 1), (3, 5)), Segment((1, 2), (5, 6)))
    importance = over_queries(attention, segments, (1.0, 1.0))
    torch.testing.assert_close(importance, torch.tensor([[0.0, 0.6, 0.2, 0.4, 0.4, 0.6]]))
