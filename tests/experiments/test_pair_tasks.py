"""The tasks in many wordings: two halves that share nothing, answers that stand in the evidence, and their scoring."""

from __future__ import annotations

import random
import re
from argparse import ArgumentTypeError
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import spec_stack
from experiments.pair import answers as pair_answers
from experiments.pair import data as pair_data
from experiments.pair import documents as pair_documents
from experiments.pair import evaluate as pair_evaluate
from experiments.pair import grammar, phrasing, wording
from experiments.pair import model as pair_model
from experiments.pair import probe as pair_probe
from experiments.pair import questions as pair_questions
from experiments.pair.values import MADE
from spec_stack import PrefillConfig

TOKENIZER = Path(spec_stack.__file__).parent / "assets" / "target" / "tokenizer.json"
TEXT = (
    "The keeper walked along the shore and counted his lonely boats before breakfast. Nobody came, which pleased him. "
)
KINDS = list(pair_questions.KINDS)
COPIED = ("facts", "relations", "table", "split", "stories", "copy", "cloze", "definitions")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def makers(tokenizer):
    ids = np.array(pair_data.encode(tokenizer, TEXT * 60), dtype=np.uint16)
    return {half: pair_questions.QuestionMaker(tokenizer, {"prose": ids}, half) for half in wording.WORDINGS}


def leaves(value: object) -> set[str]:
    """Every text in a nest of tuples, dicts and relations."""
    if isinstance(value, str):
        return {value} if value.strip() else set()
    if isinstance(value, dict):
        return set().union(*(leaves(part) for part in value.values()))
    if isinstance(value, wording.Relation):
        return leaves((value.facts, value.questions, value.inverse))
    return set().union(*(leaves(part) for part in value))


@pytest.mark.parametrize("name", [field.name for field in fields(wording.Wording) if field.name != "things"])
def test_the_halves_share_no_form_and_no_word(name):
    train, test = (leaves(getattr(half, name)) for half in (wording.TRAIN, wording.TEST))
    assert train
    assert test
    assert not {text.strip().casefold() for text in train} & {text.strip().casefold() for text in test}


def test_the_halves_share_no_entity_no_attribute_and_no_place():
    for kind, (heads, tails, _) in wording.TEST.things.items():
        others = wording.TRAIN.things.get(kind, ((), (), ""))
        assert not set(heads) & set(others[0])
        assert not set(tails) & set(others[1])
    pools = [leaves((half.nouns, half.word_attributes, half.pools)) for half in (wording.TRAIN, wording.TEST)]
    assert not pools[0] & pools[1]
    assert not set(wording.PLACES["train"]) & set(wording.PLACES["test"])
    assert not {*pair_answers.HAYSTACK_DOMAINS["train"]} & {*pair_answers.HAYSTACK_DOMAINS["test"]}


def test_free_words_of_training_are_none_of_the_other_half(makers):
    held_out = {word.lower() for word in phrasing.all_words(wording.TEST)}
    assert "passcode" in held_out
    assert len(makers["train"].wild) > 8
    assert not set(makers["train"].wild) & held_out
    assert makers["test"].wild == []


@pytest.mark.parametrize("half", list(wording.WORDINGS))
def test_the_same_seed_makes_the_same_task_and_another_seed_another(makers, half):
    first, again, other = (makers[half].made(random.Random(seed), 700) for seed in (1, 1, 2))
    assert first.sequence == again.sequence
    assert first.sequence.ids != other.sequence.ids


@pytest.mark.parametrize("half", list(wording.WORDINGS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_can_be_found_in_its_evidence_by_rule(makers, tokenizer, half, kind):
    for seed in range(25):
        made = makers[half].made(random.Random(seed), 900, kind)
        ids = made.sequence.ids
        assert made.questions
        for question, spans, (start, end) in zip(made.questions, made.spans, made.answers, strict=True):
            answer, said = question.answer.strip(), tokenizer.decode(ids[start:end]).strip()
            evidence = [tokenizer.decode(ids[first:last]) for first, last in spans]
            assert answer == said if question.source is None else answer in said
            assert question.source is None or said in evidence[-1]
            assert ids[start - 1] == pair_model.ASSISTANT
            assert ids[end] == pair_model.END
            assert all(last <= made.sequence.tail for _, last in spans)
            assert solved(kind, answer, evidence)


def solved(kind: str, answer: str, evidence: list[str]) -> bool:
    """Whether reading the evidence alone gives the answer."""
    if kind in COPIED:
        return answer in evidence[-1]
    if kind == "several values":
        return all(value in text for value, text in zip(answer.split(", "), evidence, strict=True))
    if kind == "edit":
        said, text = answer.split(), evidence[0].split()
        changed = {(old, new) for old, new in zip(text, said, strict=True) if old != new}
        return len(changed) <= 1
    if kind == "chains":
        names = answer.split(" = ")
        return names[-1] in evidence[0] and all(
            name in text for name, text in zip(reversed(names[:-1]), evidence, strict=True)
        )
    if kind == "counting":
        return int(answer) == len(evidence)
    return Counter(re.findall("[a-z]+", re.split("[:=]", evidence[0])[-1])).most_common(1)[0][0] == answer


@pytest.mark.parametrize("half", list(wording.WORDINGS))
@pytest.mark.parametrize("kind", ["facts", "relations", "split", "stories"])
def test_an_answer_quotes_from_what_was_asked_about_or_begins_with_what_was_asked_for(makers, tokenizer, half, kind):
    asked_about = 0
    for seed in range(25):
        made = makers[half].made(random.Random(seed), 900, kind)
        for question, (start, end) in zip(made.questions, made.answers, strict=True):
            said = tokenizer.decode(made.sequence.ids[start:end]).strip()
            if question.text.endswith(wording.WORDINGS[half].sentence_instructions):
                continue
            first = re.split(r"[^A-Za-z0-9]+", said.strip("\"'`*<([{"))[0].lower()
            known = first in question.text.lower()
            asked_about += known
            assert known or said.startswith(question.answer)
    assert asked_about > 40


@pytest.mark.parametrize("half", list(wording.WORDINGS))
def test_links_lead_to_the_evidence_and_copies_to_the_very_token(makers, half):
    num_copied = 0
    for seed in range(60):
        made = makers[half].made(random.Random(seed), 700)
        spans = {span for found in made.spans for span in found}
        answered = {at - 1 for start, end in made.answers for at in range(start, end)}
        for query, start, end in made.sequence.links:
            assert (start, end) in spans
            assert query in answered
        for query, at in made.sequence.copies:
            assert made.sequence.ids[query + 1] == made.sequence.ids[at]
            assert any(start <= at < end for start, end in spans)
            num_copied += 1
    assert num_copied > 300


def test_only_answers_and_their_ends_have_a_loss(makers):
    for seed in range(20):
        made = makers["train"].made(random.Random(seed), 700)
        wanted = {at for start, end in made.answers for at in range(start, end + 1)}
        assert {at for at, weight in enumerate(made.sequence.weights) if weight} == wanted


def test_questions_stand_before_the_document_after_it_or_in_a_later_turn(makers, tokenizer):
    shapes = Counter()
    for seed in range(120):
        made = makers["train"].made(random.Random(seed), 500, "facts", 1)
        text = tokenizer.decode(made.sequence.ids[: made.answers[0][0]], skip_special_tokens=False)
        evidence = tokenizer.decode(made.sequence.ids[slice(*made.spans[0][0])])
        asked = text.rindex(made.questions[0].text)
        shapes["before" if asked < text.index(evidence) else "later" if text.count("<|user|>") > 1 else "after"] += 1
    assert min(shapes.values()) > 5
    assert len(shapes) == 3


def test_the_mixture_uses_every_kind_and_hundreds_of_forms(makers):
    kinds = {makers["train"].task(random.Random(seed), 500).kind for seed in range(300)}
    assert kinds == set(KINDS)
    rng = random.Random(0)
    forms = {makers["train"].form(rng)[0] for _ in range(2000)}
    assert len(forms) > 500
    assert all(form.count(slot) >= 1 for form in forms for slot in ("{v}",))


def test_forms_made_by_the_grammar_are_thousands_and_none_of_the_other_half():
    rng = random.Random(1)
    statements = {grammar.statement(rng) for _ in range(5000)}
    questions = {grammar.question(rng) for _ in range(5000)}
    assert min(len(statements), len(questions)) > 1500
    assert all(form.count("{v}") == 1 and "{e}" in form and "{a}" in form for form in statements)
    assert all("{e}" in form and "{a}" in form and "{v}" not in form for form in questions)
    assert not {form.casefold() for form in statements} & {form.casefold() for form in wording.TEST.statements}
    asked = {form.casefold() for form in (*wording.TEST.questions, *wording.TEST.keywords)}
    assert not {form.casefold() for form in questions} & asked
    facts = {form.casefold() for relation in grammar.relations() for form in relation.facts}
    assert not facts & {form.casefold() for relation in wording.TEST.relations for form in relation.facts}


def test_made_up_values_are_of_no_kind_of_the_other_half():
    rng = random.Random(2)
    made = [grammar.value(rng, ["river", "stone"]) for _ in range(3000)]
    others = {kind: [MADE[kind](rng, wording.TEST) for _ in range(200)] for kind in wording.TEST.value_kinds}
    assert not set(made) & {text for texts in others.values() for text in texts}
    assert not [text for text in made if re.fullmatch(r"v[0-9.]+|[0-9]+:[0-9]+|[0-9]+,[0-9]+", text)]


def test_a_half_that_does_not_exist_is_refused(tokenizer):
    with pytest.raises(ValueError, match="halves"):
        pair_questions.QuestionMaker(tokenizer, {}, "both")


# -- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" The code is 4821.", "4821", True),
        (" 14821", "4821", False),
        (" the Ferry\n Aurora", "the ferry Aurora", True),
        (" 12", " 1", False),
        ("", "x", False),
    ],
)
def test_an_answer_is_right_when_it_stands_there_as_words_of_its_own(text, answer, right):
    assert pair_answers.is_right(text, answer) is right


def test_the_interval_holds_the_share_and_narrows_with_more_prompts():
    few, many = pair_answers.interval(7, 10), pair_answers.interval(70, 100)
    assert few[0] < many[0] < 0.7 < many[1] < few[1]
    assert pair_answers.interval(0, 5)[0] == 0.0
    assert few == pytest.approx((0.3968, 0.8922), abs=1e-3)  # Wilson 1927


@pytest.mark.parametrize("rng", [None, random.Random(0)])
def test_a_control_keeps_as_much_in_whole_chunks_with_both_ends(rng):
    config = PrefillConfig()
    kept = pair_answers.control(1000, 200, config, rng)
    size = config.chunk_size
    assert abs(len(kept) - 200) < size
    assert kept == sorted(set(kept))
    assert {0, 999} <= set(kept)
    chunks = {at // size for at in kept}
    assert kept == [at for at in range(1000) if at // size in chunks]
    if rng is None:
        assert sorted(chunks)[1:] == list(range(max(chunks) - len(chunks) + 2, max(chunks) + 1))


def test_a_model_that_copies_by_hand_gets_every_answer_right(makers):
    made = makers["test"].made(random.Random(3), 600, "facts")
    ids = torch.tensor(made.sequence.ids)

    class Knowing(torch.nn.Module):  # its first choice is always the token that comes
        def hidden_at(self, given, positions, queries_at, window):
            return queries_at[None], None, None

        def logits(self, queries_at):
            return torch.nn.functional.one_hot(ids[queries_at + 1], 4096).float()

    assert pair_probe.right_answers(Knowing(), made) == [True] * len(made.questions)
    start, _ = made.answers[0]
    ids[start] += 1
    assert pair_probe.right_answers(Knowing(), made)[0] is False


def test_a_table_shows_shares_with_their_intervals():
    rows = {
        "test 2000 facts": pair_answers.shares(
            [{"dense": True, "sparse 0.2": True}, {"dense": False, "sparse 0.2": True}]
        )
    }
    assert rows["test 2000 facts"]["sparse 0.2 of dense"][0] == 1.0
    table = pair_evaluate.tables({"one": {"answers": rows}})
    assert "| test 2000 facts | 2 | 0.50 (0.09-0.91) | 1.00 (0.34-1.00) | 1.00 (0.21-1.00) |" in table


def test_lengths_are_read_with_their_numbers():
    assert pair_evaluate.parse_length("2000=6") == (2000, 6)
    with pytest.raises(ArgumentTypeError, match="LENGTH=PROMPTS"):
        pair_evaluate.parse_length("2000")


@pytest.mark.slow
def test_the_embedded_pair_is_measured_on_every_column(tokenizer):
    generator = spec_stack.SpecStackGenerator.from_pretrained(None, None, precision="fp32", device="cpu")
    documents = [("summaries_made", pair_data.encode(tokenizer, TEXT * 40))]
    rows = pair_answers.answers(
        generator, documents, lengths={600: 1}, keep_rates=(0.2, 0.5), kinds=("facts", "chains")
    )
    assert set(rows) == {"test 600 facts", "test 600 chains", "test 600 all"}
    row = rows["test 600 all"]
    assert row["num"] == 1
    assert {"dense", "draft alone", "sparse 0.2", "kept 0.5", "random 0.5", "recent 0.5"} <= set(row)
    maker = pair_questions.QuestionMaker(tokenizer, pair_answers.haystacks(documents, "test"), "test")
    fact = "The red code for Alice is 48213."  # what both editions know
    asked = pair_documents.Question("What is the red code for Alice?", "48213", (0,), (0, 4, 31))
    task = pair_documents.Task("facts", [pair_documents.Statement(fact, True)], [asked])
    made = maker.documents.assemble(random.Random(1), task, 1200)
    found = pair_answers.one_prompt(generator, made, (0.5,), random.Random(0))
    assert found["dense"]
    assert found["draft alone"]
    assert found["kept 0.5"]
    assert found["sparse 0.5"]
    assert not found["recent 0.5"] or made.spans[0][0][0] > 0.4 * len(made.sequence.ids)
    with pytest.raises(ValueError, match="held-out text"):
        pair_answers.answers(generator, documents, halves=("train",), lengths={600: 1})
