"""BM25 as a selection rule: the formula, the question on every route, text without spaces, no text at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.rules.bm25 import bm25
from spec_stack.prefill.segments import make_segments
from tests.support import reference_bm25

words = st.sampled_from("abcdef")


@given(st.lists(st.lists(words, max_size=8), min_size=1, max_size=12), st.dictionaries(words, st.floats(0.1, 1)))
def test_scores_equal_the_formula_word_by_word(bodies: list[list[str]], asked: dict[str, float]) -> None:
    assert bm25(bodies, dict(asked)) == pytest.approx(reference_bm25.scores(bodies, asked))


def scores(pieces: list[str], protected: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
    config = PrefillConfig()
    evidence = ScoringInputs(PromptText(list(range(len(pieces))), pieces, protected))
    return make_rule("bm25").score(evidence, make_segments(len(pieces), pieces, config), config)


DOCUMENT = ["The", " barn", " was", " red", ".\n", "A", " mill", " stands", " by", " the", " river", ".\n"] + [
    " nothing",
    " here",
    ".\n",
] * 40


QUESTION = ["Where", " is", " the", " mill", "?"]
INSTRUCTIONS = [" Quote", " the", " red", " barn", " if", " it", " was", " not", " found", ".\n"]


@pytest.mark.parametrize(
    ("pieces", "protected"),
    [
        ([*DOCUMENT, *QUESTION], ()),
        ([*DOCUMENT, *QUESTION, "\n", *INSTRUCTIONS], ()),
        ([*QUESTION, "\n", *DOCUMENT], ()),
        (["<user>", *QUESTION, "<end>", "<tool>", *DOCUMENT, "<end>"], ((0, 1), (6, 8), (140, 141))),
        (["<system>", *QUESTION, "\n", "<user>", *DOCUMENT, "<end>"], ((0, 8), (140, 141))),
    ],
    ids=["last", "in front of instructions", "first", "in an earlier turn", "in the system message"],
)
def test_the_line_that_shares_the_questions_words_is_the_best(
    pieces: list[str], protected: Sequence[tuple[int, int]]
) -> None:
    borders = make_segments(len(pieces), pieces, PrefillConfig()).borders
    best = int(scores(pieces, protected).argmax())
    assert "".join(pieces[borders[best] : borders[best + 1]]) == "A mill stands by the river.\n"


def test_the_question_itself_has_no_score() -> None:
    assert scores([*DOCUMENT, *QUESTION])[-1] == 0


def test_a_request_without_a_question_mark_is_looked_for_at_the_end() -> None:
    pieces = [*DOCUMENT, "Find", " the", " mill", "."]
    assert int(scores(pieces).argmax()) == 1


def test_scripts_without_spaces_are_searched_by_the_character() -> None:
    pieces = [*"猫は庭にいる。\n犬は家にいる。\n鳥は空をとぶ。\n", *"犬はどこ？"]
    assert int(scores(pieces).argmax()) == 1


def test_without_text_tokens_are_the_words() -> None:
    ids = [*range(100), *[500] * 100, 40, 41]
    config = PrefillConfig(chunk_size=10)
    inputs, segments = ScoringInputs(PromptText(ids)), make_segments(202, None, config)
    assert int(make_rule("bm25").score(inputs, segments, config).argmax()) == 4
