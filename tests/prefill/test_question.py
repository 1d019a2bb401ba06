"""Rare words in common with the question raise a segment's score: identifiers, which attention alone confuses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from spec_stack import PrefillConfig
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import question_tokens
from spec_stack.prefill.question import raise_named, score_for_recall
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
    evidence = ScoringInputs(PromptText(list(range(num_tokens)), pieces), importance=importance)
    return evidence, make_segments(num_tokens, pieces, PrefillConfig())


def line_of(segments: Segments, pieces: Sequence[str], word: str) -> int:
    return next(at for at, (start, stop) in enumerate(segments) if word in pieces[start:stop])


FUNCTION = """def {}(value, options):
    if not options:
        raise ValueError('no options')
    return value * {}

"""
SECTION = """## {}

The settings are read at start. Operators see the state.
By default it runs {} workers.

"""
NAMES = ["load", "save", "parse", "merge", "split", "check", "build", "fetch", "clean", "pack", "sort", "trim"]
FUNCTIONS = [FUNCTION.format(name, 9 + at) for at, name in enumerate(NAMES)]
SECTIONS = [SECTION.format(name, 9 + at) for at, name in enumerate(NAMES)]
PROMPTS = {
    "What is the total of the order with the id ord-4017?": RECORDS,
    "Which order went to Skelton?": RECORDS,
    "Is ord-4003 or ord-4017 dearer?": RECORDS,
    "Name the order 4021.": RECORDS,
    "By which factor does fetch multiply its value?": FUNCTIONS,
    "How many workers does fetch run by default?": SECTIONS,
}


@pytest.mark.parametrize("question", PROMPTS)
def test_scores_are_those_by_hand(question: str) -> None:
    pieces = pieces_of("".join(PROMPTS[question]) + question)
    evidence, segments = evidence_of(pieces, len(pieces))
    scores = torch.rand(2, len(segments), generator=torch.Generator().manual_seed(3))
    question_ids = question_tokens(evidence.candidates)
    for own, raised in zip(scores, raise_named(scores, evidence, segments), strict=True):
        expected = reference_question.raised(own.tolist(), pieces, list(segments), segments.heads, question_ids)
        assert raised.tolist() == pytest.approx(expected)


def test_tokens_without_text_count_by_attention_alone() -> None:
    evidence, segments = evidence_of(None, 200)
    scores = torch.rand(len(segments))
    assert torch.equal(raise_named(scores, evidence, segments), scores)


def test_the_papers_scoring_queries_count_by_attention_alone() -> None:
    pieces = pieces_of("".join(RECORDS) + QUESTION)
    evidence, segments = evidence_of(pieces, len(pieces))
    paper = PrefillConfig.full_look_ahead()
    scores = make_rule("attention").score(evidence, segments, paper)
    assert torch.equal(scores, segments.mean_importance(evidence.token_importance(paper), paper))


def recall_scores(old: str, new: str) -> tuple[list[str], Segments, ScoringInputs]:
    """The pieces of a conversation, the segments of its old text, and its inputs."""
    pieces = pieces_of(old)
    num_old, pieces = len(pieces), [*pieces, *pieces_of(new)]
    inputs = ScoringInputs(PromptText(list(range(len(pieces))), pieces), importance=torch.zeros(len(pieces)))
    return pieces, make_segments(num_old, pieces[:num_old], PrefillConfig()), inputs


@pytest.mark.parametrize("question", [*PROMPTS, "Tell me the total of ord-4017.", "And the order ord-4003?"])
def test_recall_scores_are_those_by_hand(question: str) -> None:
    pieces, segments, inputs = recall_scores("".join(PROMPTS.get(question, RECORDS)), question)
    question_ids = question_tokens(inputs.candidates.reaching(segments.num_tokens))
    expected = reference_question.shared(
        pieces, list(segments), segments.heads, question_ids, short_word=0.5, power=0.5, most_units=6
    )
    assert score_for_recall(inputs, segments).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("new", ["Thanks! Can you say that more briefly?", "Why?", "Are you sure about that?"])
def test_function_words_recall_nothing(new: str) -> None:
    old = "He was not so sure that he can do it. Why, nobody knew about it.\n" * 2 + "They say so.\n" + "".join(RECORDS)
    _, segments, inputs = recall_scores(old, new)
    assert score_for_recall(inputs, segments).max() < 1
