"""Needles: where their lines stand, and what words they share with their questions."""

from __future__ import annotations

import random
import re
from copy import copy

import pytest

from spec_stack.calibrate.needles import FAMILIES, hide, make_prompt_text
from spec_stack.calibrate.prompts import encode_haystack
from spec_stack.calibrate.shapes import GROUPS, LONGEST, SHAPES
from spec_stack.engine.pair import ModelPair

LINES = [f"line {number} of a text that says nothing" for number in range(400)]
TEXTS = {"text": ["\n".join(LINES)], "code": ["\n".join(LINES)]}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(device="cpu", prepack_linears=False, target_weights=False)


@pytest.mark.parametrize(
    ("kind", "index"), [(kind, index) for kind, family in FAMILIES.items() for index in range(len(family.needles))]
)
def test_a_needle_s_lines_stand_where_the_haystack_says(kind: str, index: int, pair: ModelPair) -> None:
    needle = FAMILIES[kind].needles[index].needle(random.Random(3))
    haystack = hide(needle, LINES, random.Random(4))
    assert tuple(haystack.document[start:stop] for start, stop in haystack.spans) == needle.evidence
    assert all(f"\n{line}\n" in f"\n{haystack.document}\n" for line in (*needle.evidence, *needle.others, *LINES))
    prompt = encode_haystack(pair.tokenizer, haystack, "question last")
    for (start, stop), line in zip(prompt.spans, needle.evidence, strict=True):
        assert line.strip() in pair.tokenizer.decode(prompt.token_ids[start:stop])
        assert line not in pair.tokenizer.decode(prompt.token_ids[start + 1 : stop])


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_wording_of_a_family_stands_whole_in_its_document(kind: str, pair: ModelPair) -> None:
    family = FAMILIES[kind]
    for number, wording in enumerate(family.needles):
        made = make_prompt_text(kind, number, 3, TEXTS, 4000)
        assert made == make_prompt_text(kind, number, 3, TEXTS, 4000)
        assert len(made.spans) == len(wording.needle(random.Random(0)).evidence)
        assert 3000 < len(made.document) < 9000
        # What is protected is the template's alone.
        prompt = encode_haystack(pair.tokenizer, made, "rules")
        (_, begin), (end, _) = prompt.text.template
        assert made.question in pair.tokenizer.decode(prompt.token_ids[begin:end])


def test_two_fields_of_a_kind_are_different_and_repeated_lines_have_other_questions() -> None:
    for seed in range(20):
        fines = FAMILIES["several facts"].needles[0].needle(random.Random(seed))
        assert len({line.split()[2] for line in (*fines.evidence, *fines.others)}) == 4
        codes = FAMILIES["fact"].needles[3].needle(random.Random(seed))
        assert len(codes.others) == 23
        subject = codes.question.removeprefix("What is the ").removesuffix("?")
        assert not any(subject in line for line in codes.others)


def test_a_family_in_other_words_shares_no_telling_word_with_its_questions() -> None:
    small = {
        *["the", "a", "of", "it", "who", "where", "when", "was", "has", "in", "to", "is", "be", "what", "that", "and"]
    }
    for kind in ("paraphrase", "log, other words", "function", "dialogue, other words"):
        for wording in FAMILIES[kind].needles:
            needle = wording.needle(random.Random(5))
            evidence, question = (
                set(re.findall(r"\w+", text.lower())) for text in (needle.evidence[0], needle.question)
            )
            assert evidence & question <= small, (kind, needle)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_holds_document_and_question_whole_and_its_evidence_is_found(shape: str, pair: ModelPair) -> None:
    made = make_prompt_text("several facts", 1, 3, TEXTS, 2000)
    text = SHAPES[shape](made.document, made.question)
    assert text.count(made.document) == text.count(made.question) == 1
    assert len(text) <= len(SHAPES[LONGEST](made.document, made.question))
    assert ("first" in shape) == (text.index(made.question) < text.index(made.document))
    prompt = encode_haystack(pair.tokenizer, made, shape)
    for (first, last), (start, stop) in zip(made.spans, prompt.spans, strict=True):
        assert made.document[first:last].strip() in pair.tokenizer.decode(prompt.token_ids[start:stop])


def test_all_shapes_are_asked_and_those_of_one_document_begin_with_it() -> None:
    assert {shape for group in GROUPS for shape in group} == set(SHAPES)
    assert all(
        SHAPES[shape]("document", "q").startswith("document") for group in GROUPS if group[1:] for shape in group
    )


def test_without_a_chat_template_the_prompt_is_the_text(pair: ModelPair) -> None:
    made = make_prompt_text("log", 0, 3, TEXTS, 2000)
    tokenizer = copy(pair.tokenizer)
    tokenizer.chat_template = None
    prompt = encode_haystack(tokenizer, made, "question last")
    assert not prompt.text.template
    assert f"{made.document}\n\n{made.question}" in tokenizer.decode(prompt.token_ids)
