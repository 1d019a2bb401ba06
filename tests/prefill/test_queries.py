"""Where the question is looked for, and what its tokens count."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from spec_stack.prefill.prompt_text import ChatTurn, PromptText, between
from spec_stack.prefill.queries import find_candidates, question_tokens
from spec_stack.prefill.segments import line_borders
from tests.support import reference_question


@pytest.mark.parametrize("seed", range(60))
def test_the_question_is_where_a_slow_reader_finds_it(seed: int) -> None:
    rng = random.Random(seed)
    pieces: list[str] = []
    template: list[tuple[int, int]] = []
    ends = [".", "?", "\n", "\n\n", "\uff1f", "=7"]
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
        assert new.num_repeated == len(slow.repeated)
        assert ([*new.asks], [*new.is_marked], [*new.is_question]) == (slow.asks, slow.is_marked, slow.is_question)
        assert question_tokens(new) == slow.words()


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
        found = {at for segment in find_candidates(text).reaching(first).segments for at in range(*segment)}
        assert found - {0} == {*range(*request), *range(*kept)}


DOCUMENT = "".join(f"line {at} of it\n" for at in range(60)) + "\n"
LONG = "word " * 90 + ".\n\n"


@pytest.mark.parametrize(
    ("text", "asking"),
    [
        (f"{DOCUMENT}{LONG}Give me line 7.", ["Give me line 7."]),
        (f"{LONG}Give me line 7.\n\nBe brief.\n\nThanks.", ["Be brief.\n\n", "Thanks."]),
        (f"{DOCUMENT.rstrip()}\nwhy?", ["why?"]),
        (f"{DOCUMENT}Where is it? And why?", ["Where is it?", " And why?"]),
        (f"Which is it?\n{LONG}Be brief.", ["Which is it?\n", "Be brief."]),
        (f"Give me line 7.\n\n{LONG}Line 8 too.\nBe brief.", ["Give me line 7.\n\n", "Line 8 too.\n", "Be brief."]),
        (f"{DOCUMENT}Where is it?\n\n{'A word of it. ' * 30}Stop.", ["Where is it?\n\n", " Stop."]),
        (f"{DOCUMENT}a = b ? c : d\nf(x?.y, ?id=7)\n\n{LONG}Give me line 7.", ["Give me line 7."]),
        (f"Is it so?\nSee below.\n{DOCUMENT}{LONG}", ["Is it so?\n"]),
        (f"Give me line 7.\n\n{LONG}{LONG}", ["Give me line 7.\n\n"]),
    ],
)
def test_the_last_paragraphs_and_the_first_line_of_a_request_ask(text: str, asking: list[str]) -> None:
    pieces = re.findall(r" ?\w+|\s+|[^\w\s]", text)
    found = find_candidates(PromptText(range(len(pieces)), pieces))
    pairs = zip(found.segments, found.asks, strict=True)
    texts = ["".join(pieces[slice(*segment)]) for segment, asks in pairs if asks]
    assert [each for each in texts if "word" not in each] == asking


def test_new_text_that_is_all_protected_holds_no_earlier_question_and_scores_by_its_own_tokens() -> None:
    pieces = ["<u>", *"where is the key?", "<a>", *"in the hall", "</a>", *"be brief!", "<a>"]
    protected = [(0, 1), (18, 19), (30, 41)]
    found = find_candidates(PromptText(range(len(pieces)), pieces, protected))
    assert True in found.asks
    for first in (30, 31, 40):
        new = found.reaching(first)
        assert (new.segments, new.asks, new.num_repeated, new.start) == ((), (), 0, first)
    assert found.reaching(41).start == 40
    assert found.reaching(29).segments == ((19, 30),)


def test_a_given_question_alone_names_what_to_look_for() -> None:
    turns = [ChatTurn("user", (1, 4)), ChatTurn("assistant", (5, 9)), ChatTurn("tool", (10, 12))]
    pieces = ["<s>", *["tidy", "it", "up", "<u>", "now", "the", "port", "of", "<a>", "no", "mesh", "<t>"]]
    text = PromptText(range(len(pieces)), pieces, between([each.span for each in turns], len(pieces)), turns=turns)
    assert question_tokens(find_candidates(text)) == {1, 2, 3, 5, 6, 7, 8}
    assert question_tokens(find_candidates(replace(text, question=turns[0].span))) == {1, 2, 3}
