"""Rare words in common with the question raise a segment's score: identifiers, which attention alone confuses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from spec_stack import PrefillConfig
from spec_stack.prefill.queries import question_words
from spec_stack.prefill.question import rare_word_factor
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments, make_segments
from tests.support import reference_question

RECORDS = [f'{{"id": "ord-{number}", "city": "Skelton", "total": {number % 97}.5}}\n' for number in range(4000, 4040)]
QUESTION = "What is the total of the order with the id ord-4017?"


def pieces_of(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def evidence_of(pieces: Sequence[str] | None, num_tokens: int) -> tuple[ScoringInputs, Segments]:
    importance = torch.full((num_tokens,), 0.01)
    evidence = ScoringInputs(list(range(num_tokens)), pieces=pieces, importance=importance)
    return evidence, make_segments(num_tokens, pieces, PrefillConfig())


def line_of(segments: Segments, pieces: Sequence[str], word: str) -> int:
    return next(at for at, (start, stop) in enumerate(segments) if word in pieces[start:stop])


@pytest.mark.parametrize(
    "question", [QUESTION, "Which order went to Skelton?", "Is ord-4003 or ord-4017 dearer?", "Name the order 4021."]
)
def test_factors_are_those_by_hand(question: str) -> None:
    pieces = pieces_of("".join(RECORDS) + question)
    evidence, segments = evidence_of(pieces, len(pieces))
    assert rare_word_factor(evidence, segments).tolist() == pytest.approx(
        reference_question.factors(pieces, list(segments), question_words(evidence.candidates))
    )


def test_of_records_with_equal_attention_the_named_one_is_kept_first() -> None:
    pieces = pieces_of("".join(RECORDS) + QUESTION)
    evidence, segments = evidence_of(pieces, len(pieces))
    named = line_of(segments, pieces, "4017")
    scores = make_rule("attention").score(evidence, segments, PrefillConfig())
    assert int(scores[: len(RECORDS)].argmax()) == named
    assert scores[named] == pytest.approx(3 * float(scores[named - 1]))


def test_a_word_in_many_lines_raises_none() -> None:
    pieces = pieces_of("".join(RECORDS) + "What does Skelton total?")
    evidence, segments = evidence_of(pieces, len(pieces))
    assert torch.equal(rare_word_factor(evidence, segments), torch.ones(len(segments)))


def test_tokens_without_text_count_by_attention_alone() -> None:
    evidence, segments = evidence_of(None, 200)
    assert torch.equal(rare_word_factor(evidence, segments), torch.ones(len(segments)))


def test_the_papers_scoring_queries_count_by_attention_alone() -> None:
    pieces = pieces_of("".join(RECORDS) + QUESTION)
    evidence, segments = evidence_of(pieces, len(pieces))
    paper = PrefillConfig.full_look_ahead()
    scores = make_rule("attention").score(evidence, segments, paper)
    assert torch.equal(scores, segments.worth(evidence.token_importance(paper), paper))
