"""BM25 as a selection rule: the formula, the question on every route, text without spaces, no text at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.prompt_text import ChatTurn, PromptText, between
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.rules.bm25 import bm25
from spec_stack.prefill.segments import make_segments
from tests.support import reference_bm25

words = st.sampled_from("abcdef")


@given(st.lists(st.lists(words, max_size=8), min_size=1, max_size=12), st.sets(words))
def test_scores_equal_the_formula_word_by_word(documents: list[list[str]], query: set[str]) -> None:
    assert bm25(documents, query) == pytest.approx(reference_bm25.scores(documents, query))


def scores(
    pieces: list[str], protected: Sequence[tuple[int, int]] = (), roles: Sequence[str] = ("user",)
) -> torch.Tensor:
    config = PrefillConfig()
    turns = zip(roles, between(protected, len(pieces)), strict=True)
    text = PromptText(list(range(len(pieces))), pieces, protected, turns=[ChatTurn(*turn) for turn in turns])
    evidence = ScoringInputs(text)
    return make_rule("bm25").score(evidence, make_segments(len(pieces), pieces, config), config)


DOCUMENT = ["The", " barn", " was", " red", ".\n", "A", " mill", " stands", " by", " the", " river", ".\n"] + [
    " nothing",
    " here",
    ".\n",
] * 40


QUESTION = ["Where", " is", " the", " mill", "?"]
INSTRUCTIONS = [" Quote", " a", " sentence", " if", " it", " can", " be", " found", ".\n"]


@pytest.mark.parametrize(
    ("pieces", "protected", "roles"),
    [
        ([*DOCUMENT, *QUESTION], (), ["user"]),
        ([*DOCUMENT, *QUESTION, "\n", *INSTRUCTIONS], (), ["user"]),
        ([*QUESTION, "\n", *DOCUMENT], (), ["user"]),
        (["<user>", *QUESTION, "<end>", "<tool>", *DOCUMENT, "<end>"], ((0, 1), (6, 8), (140, 141)), ["user", "tool"]),
    ],
    ids=["last", "in front of instructions", "first", "in an earlier turn"],
)
def test_the_line_that_shares_the_questions_words_is_the_best(
    pieces: list[str], protected: Sequence[tuple[int, int]], roles: Sequence[str]
) -> None:
    borders = make_segments(len(pieces), pieces, PrefillConfig()).borders
    best = int(scores(pieces, protected, roles).argmax())
    assert "".join(pieces[borders[best] : borders[best + 1]]) == "A mill stands by the river.\n"


def test_scripts_without_spaces_are_searched_by_the_character() -> None:
    pieces = [*"猫は庭にいる。\n犬は家にいる。\n鳥は空をとぶ。\n", *"犬はどこ？"]
    assert int(scores(pieces).argmax()) == 1


def test_without_text_tokens_are_the_words() -> None:
    ids = [*range(100), *[500] * 100, 40, 41]
    config = PrefillConfig(chunk_size=10)
    inputs, segments = ScoringInputs(PromptText(ids)), make_segments(202, None, config)
    assert int(make_rule("bm25").score(inputs, segments, config).argmax()) == 4


def test_new_text_is_searched_for_the_words_of_a_request_before_it() -> None:
    pieces = ["<user>", "Find", " the", " mill", ".", "<call>", "Reading", " on", ".", "<tool>", *DOCUMENT]
    protected = [(0, 1), (5, 6), (9, 10)]
    turns = zip(["user", "assistant", "tool"], between(protected, len(pieces)), strict=True)
    text = PromptText(list(range(len(pieces))), pieces, protected, turns=[ChatTurn(*turn) for turn in turns])
    new = ScoringInputs(text).starting_at(10)
    segments = make_segments(len(DOCUMENT), DOCUMENT, PrefillConfig())
    assert int(make_rule("bm25").score(new, segments, PrefillConfig()).argmax()) == 1
