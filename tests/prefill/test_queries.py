"""Where the question is looked for, and what its tokens count."""

from __future__ import annotations

import random

import pytest
import torch

from spec_stack.prefill.importance import Segment, over_queries
from spec_stack.prefill.prompt_text import ChatTurn, PromptText, between
from spec_stack.prefill.queries import find_candidates, question_words
from spec_stack.prefill.segments import line_borders
from tests.support import reference_question


@pytest.mark.parametrize("seed", range(60))
def test_the_question_is_where_a_slow_reader_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    pieces: list[str] = []
    template: list[tuple[int, int]] = []
    ends = [".", "?", "\n", "\uff1f", "?)", "=7", '?"']
    for turn in range(rng.randrange(0, 7)):
        begin = len(pieces)
        pieces += ["<t>"] * rng.choice([1, 3, 90 if turn == 0 else 2])
        template.append((begin, len(pieces)))
        for _ in range(rng.randrange(1, 9)):
            pieces += ["word"] * rng.choice([1, 2, 5, 30, 150]) + [rng.choice(ends), "\n"]
    pieces += ["<t>"] * rng.choice([1, 4, 12])
    template.append((len(pieces) - rng.choice([0, 1]), len(pieces)))
    template = template if rng.random() < 0.8 else []
    spans = between(template, len(pieces))
    roles = [rng.choice(["user", "assistant", "tool"]) for _ in spans]
    turns = [ChatTurn(*each) for each in zip(roles, spans, strict=True)] if template else []
    found = find_candidates(PromptText(range(len(pieces)), pieces, template, turns=turns))
    roles = roles if template else ["user"] * len(spans)
    expected = reference_question.question_of(pieces, line_borders(pieces), template, roles)
    for first in (0, *rng.sample(range(len(pieces)), k=min(4, len(pieces)))):
        new, slow = found.reaching(first), expected.since(first)
        assert [*new.segments] == [*slow.repeated, *slow.in_place]
        assert (new.num_repeated, [*new.is_question], new.opening) == (len(slow.repeated), slow.marked, slow.opening)
        assert question_words(new) == pytest.approx(slow.words())


@pytest.mark.parametrize("num_results", range(1, 11))
def test_the_last_user_message_asks_whatever_results_are_behind_it(num_results: int) -> None:
    turns, pieces = [], ["<system>"]
    for role, text in [
        ("user", "find the mill now"),
        *[("assistant", "look at it"), ("tool", "no mill is here")] * num_results,
    ]:
        turns.append(ChatTurn(role, (len(pieces), len(pieces) + len(text))))
        pieces += [*text, f"<{role}>\n"]
    text = PromptText(
        range(len(pieces)), pieces, turns=turns, template=between([each.span for each in turns], len(pieces))
    )
    request, plan = turns[0].span, turns[-2].span
    for first, kept in ((0, plan), (plan[0], plan), (len(pieces) - 3, (0, 0))):
        asked = {at for segment in find_candidates(text).reaching(first).segments for at in range(*segment)}
        assert asked - {0} == {*range(*request), *range(*kept)}


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("Who was it?", True),
        ("Who said 'why?'", True),
        ("Qui est-ce\u00a0?\n", True),
        ("\u8c01\uff1f", True),
        ("user?.name ? a : b", False),
        ("GET /items?id=77", False),
        ("let x = parse(y)?", False),
        ("a ?? b", False),
    ],
)
def test_a_question_mark_behind_a_word_ends_a_question(text: str, asks: bool) -> None:
    assert find_candidates(PromptText(range(len(text)), list(text))).is_question[0] is asks


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
