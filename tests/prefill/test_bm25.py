"""BM25 as a selection rule: the formula, the question on every route, text without spaces, no text at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.rules.bm25 import bm25
from spec_stack.prefill.units import make_units
from tests.support import reference_bm25

words = st.sampled_from("abcdef")


@given(st.lists(st.lists(words, max_size=8), min_size=1, max_size=12), st.dictionaries(words, st.floats(0.1, 1)))
def test_scores_equal_the_formula_word_by_word(bodies: list[list[str]], asked: dict[str, float]) -> None:
    assert bm25(bodies, dict(asked)) == pytest.approx(reference_bm25.scores(bodies, asked))


def scores(pieces: list[str], question: tuple[int, int] | None) -> torch.Tensor:
    config = PrefillConfig()
    evidence = Evidence(list(range(len(pieces))), question=question, pieces=pieces)
    return make_rule("bm25").score(evidence, make_units(len(pieces), pieces, config), config)


DOCUMENT = ["The", " barn", " was", " red", ".\n", "A", " mill", " stands", " by", " the", " river", ".\n"] + [
    " nothing",
    " here",
    ".\n",
] * 40


def test_the_line_that_shares_the_questions_words_is_the_best_and_the_question_itself_has_none() -> None:
    pieces = [*DOCUMENT, "Where", " is", " the", " mill", "?"]
    found = scores(pieces, (len(DOCUMENT), len(pieces)))
    assert int(found.argmax()) == 1
    assert found[-1] == 0


def test_a_turn_with_its_document_before_the_question_is_searched_for_its_end() -> None:
    pieces = [*DOCUMENT, "Where", " is", " the", " mill", "?"]
    for question in ((0, len(pieces)), None):
        assert int(scores(pieces, question).argmax()) == 1


def test_scripts_without_spaces_are_searched_by_the_character() -> None:
    pieces = [*"猫は庭にいる。\n犬は家にいる。\n鳥は空をとぶ。\n", *"犬はどこ?"]
    assert int(scores(pieces, (len(pieces) - 5, len(pieces))).argmax()) == 1


def test_without_text_tokens_are_the_words() -> None:
    ids = [*range(100), *[500] * 100, 40, 41]
    config = PrefillConfig(chunk_size=10)
    evidence = Evidence(ids, question=(200, 202))
    assert int(make_rule("bm25").score(evidence, make_units(202, None, config), config).argmax()) == 4


def test_fusion_with_attention_leaves_the_order_to_attention_where_no_word_is_shared() -> None:
    pieces = [*DOCUMENT, "Why", "?"]
    config = PrefillConfig()
    importance = torch.rand(len(pieces), generator=torch.Generator().manual_seed(2))
    evidence = Evidence(list(range(len(pieces))), None, (len(DOCUMENT), len(pieces)), pieces, importance)
    units = make_units(len(pieces), pieces, config)
    both, alone = (make_rule(name).score(evidence, units, config) for name in ("attention_bm25", "attention"))
    assert torch.equal(both.argsort(), alone.argsort())
