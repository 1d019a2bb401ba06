"""Questions about long documents in many wordings: made on the fly, seeded, from one half of `wording`.

A task is a document of real text with statements in it, and questions whose answers are copied from those statements,
token for token (so a word that follows a space keeps it). An answer quotes its statement from what was asked about to
what was asked for ("Anna's locker is 4711"): a model that has said the first can find the second by going on as the
document does. Each answer says where its evidence stands (`links`), and each copied token where it was copied from
(`copies`).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from experiments.pair import grammar
from experiments.pair.model import ASSISTANT, BOS, END, USER
from experiments.pair.tasks import Sequence
from experiments.pair.values import entity, number, value
from experiments.pair.wording import PLACES, WORDINGS, Relation, Wording, listed

# How often each kind of task is drawn.
KINDS = {
    "facts": 5.0,
    "relations": 3.0,
    "table": 1.5,
    "several values": 0.5,
    "split": 1.0,
    "stories": 1.0,
    "copy": 0.8,
    "edit": 0.4,
    "cloze": 1.2,
    "definitions": 0.5,
    "chains": 0.4,
    "counting": 0.2,
    "common": 0.2,
}


# How often a verb is asked backwards, for the one who did it; a fact half as often. Training asks less of it: a model
# that reads forwards hardly learns it, and its losses would drown the rest.
BACKWARDS = {"train": 0.08, "test": 0.25}
# What chatter is half made of.
_SMALL_WORDS = listed(
    """the, a, I, you, we, it, this, that, and, or, to, of, in, on, with, for, is, was, are, be, can, could, will,
    would, have, had, please, thank, not, only, more, very, so, if, when, what, how, who, one, two, some, any, all, my,
    your, about, from, at, by"""
)

Coded = tuple[list[int], list[tuple[int, int]], int]


@dataclass(frozen=True)
class Statement:
    """Text that goes into the document, after a sentence or as a line of its own."""

    text: str
    own_line: bool = False


@dataclass
class Question:
    """A question and its answer.

    answer: what was asked for. source: what is said, (statement, start, end) in characters of the statement; without
    one the answer itself is said.
    evidence: indexes of the statements that hold the answer.
    """

    text: str
    answer: str
    evidence: tuple[int, ...] = ()
    source: tuple[int, int, int] | None = None


@dataclass
class Task:
    """The statements in the order of the document, and what is asked of them.

    in_order: their order matters; spread: scatter them, otherwise they stand as one block.
    """

    kind: str
    statements: list[Statement]
    questions: list[Question]
    in_order: bool = False
    spread: bool = True


@dataclass
class Made:
    """A finished task: the sequence, and for each question its text, its answer, its evidence spans and its answer's
    token span in the sequence."""

    kind: str
    sequence: Sequence
    questions: list[Question]
    spans: list[list[tuple[int, int]]]
    answers: list[tuple[int, int]]


def as_identifier(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def all_words(words: Wording) -> set[str]:
    """Every word that a half's entities, attributes and values are made of."""
    texts = [*words.first_names, *words.surnames, *words.qualifiers, *words.nouns]
    texts += [part for heads, tails, _ in words.things.values() for part in (*heads, *tails)]
    texts += [text for group in (words.pools, words.word_attributes) for pool in group.values() for text in pool]
    return set(re.findall("[A-Za-z]+", " ".join(texts)))


class QuestionMaker:
    """Draws tasks of a wanted length from one half of the wording. The same rng gives the same tasks.

    Parameters
    ----------
    tokenizer
        The pair's.
    haystacks
        Token ids of real text by kind, to hide the statements in.
    half
        "train" or "test".
    max_questions
        The most questions of one sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer, haystacks: Mapping[str, np.ndarray], half: str, *, max_questions: int = 24
    ) -> None:
        if half not in WORDINGS:
            raise ValueError(f"the wording has the halves {sorted(WORDINGS)}, not {half!r}")
        self.tokenizer, self.haystacks, self.max_questions = tokenizer, haystacks, max_questions
        self.half, self.words, self.places = half, WORDINGS[half], PLACES[half]
        texts = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
        self.ends_sentence = np.array([text.endswith((".", "?", "!", "\n")) for text in texts])
        self.wild = self.wild_words() if half == "train" else []
        self.kinds: dict[str, Callable[[random.Random, int], Task]] = {
            "facts": self.facts,
            "relations": self.relations,
            "table": self.table,
            "several values": self.several_values,
            "split": self.split,
            "stories": self.stories,
            "copy": self.copying,
            "edit": self.editing,
            "cloze": self.cloze,
            "definitions": self.definitions,
            "chains": self.chains,
            "counting": self.counting,
            "common": self.common,
        }

    # -- words -------------------------------------------------------------------------------------------------

    def wild_words(self, num_tokens: int = 150_000) -> list[str]:
        """Words of the haystacks that the other half does not use: so that a name need not be a known one."""
        found: set[str] = set()
        for ids in self.haystacks.values():
            piece = ids[:num_tokens].astype(np.int64)
            found |= set(re.findall(r"(?<![A-Za-z])[A-Za-z]{4,10}(?![A-Za-z])", self.tokenizer.decode(piece.tolist())))
        kept_out = {word.lower() for word in all_words(WORDINGS["test"])}
        return sorted({word.lower() for word in found} - kept_out)

    def wild_record(self, rng: random.Random) -> str:
        """A made-up form of a record: entity and attribute, then the value, with any marks between them."""
        order = rng.choice(
            (
                ["{e}", "{a}", "{v}"],
                ["{a}", "{e}", "{v}"],
                ["{e}", "{a}", "{v}"],
                ["{v}", "{a}", "{e}"],
                ["{e}", "{v}", "{a}"],
            )
        )
        marks = (
            ": ",
            " = ",
            " | ",
            ", ",
            " - ",
            " -> ",
            "; ",
            "\t",
            " ~ ",
            " ",
            " .. ",
            "=",
            ":",
            ",",
            "|",
            " > ",
            " * ",
            " is ",
            " has ",
        )
        around = rng.choice(("{}", "{}", "{}", "[{}]", "({})", '"{}"', "<{}>", "'{}'", "*{}*", "`{}`"))
        parts = [around.format(part) if rng.random() < 0.5 else part for part in order]
        begin = rng.choice(
            (
                "",
                "",
                "",
                "- ",
                "* ",
                "# ",
                "> ",
                "+ ",
                "log: ",
                "note ",
                f"{number(rng, 1, 3)}. ",
                f"{number(rng, 4, 6)} ",
            )
        )
        return (
            begin
            + parts[0]
            + rng.choice(marks)
            + parts[1]
            + rng.choice(marks)
            + parts[2]
            + rng.choice(("", "", ".", ";", ","))
        )

    def form(self, rng: random.Random) -> tuple[str, bool]:
        """A form of a fact, and whether it is a record (a line of its own)."""
        words = self.words
        if rng.random() < 0.45:
            return (self.wild_record(rng) if self.wild and rng.random() < 0.5 else rng.choice(words.records)), True
        if self.wild and rng.random() < 0.7:
            return grammar.statement(rng), False
        form = rng.choice(words.statements)
        if rng.random() < 0.25:
            form = rng.choice(words.lead_ins) + form
        if rng.random() < 0.15 and form.endswith("."):
            form = form[:-1] + rng.choice(words.tails) + "."
        return form, False

    def attribute(self, rng: random.Random) -> tuple[str, str]:
        """An attribute and the kind of its values."""
        words = self.words
        if rng.random() < 0.3:
            kind = rng.choice(list(words.word_attributes))
            return rng.choice(words.word_attributes[kind]), kind
        if self.wild and rng.random() < 0.6:
            named = " ".join(rng.choice(self.wild) for _ in range(rng.choice((1, 1, 2))))
            return named, "wild" if rng.random() < 0.4 else rng.choice(words.value_kinds)
        noun = rng.choice(words.nouns)
        if rng.random() < 0.6:
            noun = f"{rng.choice(words.qualifiers)} {noun}"
        return noun, rng.choice(words.value_kinds)

    def entity(self, rng: random.Random) -> str:
        if self.wild and rng.random() < 0.45:
            named = " ".join(rng.choice(self.wild) for _ in range(rng.choice((1, 2))))
            return rng.choice((named, named.title(), named.title(), named.replace(" ", "_"), named.upper()))
        return entity(rng, self.words, "person" if rng.random() < 0.5 else rng.choice(list(self.words.things)))

    def value(self, rng: random.Random, kind: str) -> str:
        if kind == "wild" or (self.wild and kind in self.words.pools and rng.random() < 0.5):
            return " ".join(rng.choice(self.wild) for _ in range(rng.choice((1, 1, 1, 2))))
        if self.wild and kind in self.words.value_kinds and rng.random() < 0.4:
            return grammar.value(rng, self.wild)
        return value(rng, self.words, kind)

    def wild_question(self, rng: random.Random, usual: str) -> str:
        """A form of a question for a value: the usual one, or in training mostly one that nobody wrote down."""
        return grammar.question(rng) if self.wild and rng.random() < 0.65 else usual

    def ask(self, rng: random.Random, core: str) -> str:
        """A question with its politeness, its case and its instructions."""
        words = self.words
        opener, instruction = rng.choice(words.openers), rng.choice(words.instructions)
        if self.wild and rng.random() < 0.4:  # any words at all, so that what matters is what the document has too
            opener = self.chatter(rng) + rng.choice((" ", " ", "\n", "\n\n"))
        if self.wild and rng.random() < 0.4:
            instruction = rng.choice((" ", " ", "\n")) + self.chatter(rng)
        text = opener + core
        if rng.random() < 0.12:
            text = text.lower()
        if rng.random() < 0.1:
            text = text.rstrip("?.")
        return text + instruction

    def chatter(self, rng: random.Random) -> str:
        """A few words of no meaning, as a sentence or the beginning of one."""
        text = " ".join(
            rng.choice(_SMALL_WORDS) if rng.random() < 0.5 else rng.choice(self.wild) for _ in range(rng.randint(1, 7))
        )
        return text[0].upper() + text[1:] + rng.choice((".", ".", ",", ":", "!", "?", ""))

    @staticmethod
    def fill(form: str, e: str = "", a: str = "", v: str = "") -> str:
        return form.format(e=e, a=a, v=v, E=as_identifier(e).upper(), A=as_identifier(a).lower())

    @staticmethod
    def place_of(form: str, filled: str, v: str) -> int:
        """Where the value begins in a filled form: found from the nearer end, since an entity may contain it."""
        tail = form[form.index("{v}") :]
        return filled.rindex(v) if "{e}" not in tail and "{a}" not in tail else filled.index(v)

    def quote_from(self, form: str, start: int, e: str, a: str) -> int:
        """Where an answer begins to quote a filled form: at its entity, else its attribute, else at the value."""
        before = form[: form.index("{v}")]
        slot = re.search(r"\{[eE]\}", before) or re.search(r"\{[aA]\}", before)
        # What stands before the slot may hold a filled one, so count back from the value.
        return start - len(self.fill(before[slot.start() :], e, a)) if slot else start

    @staticmethod
    def around(text: str, one: str, other: str) -> tuple[int, int]:
        """The span of a text that holds two of its parts."""
        places = [(text.index(part), text.index(part) + len(part)) for part in (one, other)]
        return min(start for start, _ in places), max(end for _, end in places)

    def distinct(self, rng: random.Random, num: int, draw: Callable[[random.Random], str]) -> list[str]:
        """num different draws, none of which contains another."""
        chosen: list[str] = []
        for _ in range(num * 20):
            text = draw(rng)
            if not any(text in other or other in text for other in chosen):
                chosen.append(text)
            if len(chosen) == num:
                break
        return chosen

    # -- tasks -------------------------------------------------------------------------------------------------

    def facts(self, rng: random.Random, length: int) -> Task:
        """Attributes of entities in any form; entities may have several attributes, and attributes several entities."""
        words = self.words
        few = rng.random() < 0.25
        num = rng.randint(1, 4) if few else max(2, min(24, length // rng.choice((40, 48, 64, 90))))
        entities = self.distinct(rng, max(1, round(num * rng.choice((1.0, 1.0, 0.5)))), self.entity)
        attributes = [self.attribute(rng) for _ in range(rng.choice((1, 2, num)))]
        pairs: dict[tuple[str, str], str] = {}
        seen: set[str] = set()
        for index in range(num):
            e, (a, kind) = entities[index % len(entities)], rng.choice(attributes)
            if (e, a) in pairs:
                a, kind = self.attribute(rng)
            v = self.value(rng, kind)
            if v not in e and e not in v and v not in seen and (e, a) not in pairs:
                pairs[e, a] = v
                seen.add(v)
        one_form = rng.random() < 0.3
        form, record = self.form(rng)
        task = Task("facts", [], [])
        for (e, a), v in pairs.items():
            if not one_form:
                form, record = self.form(rng)
            text = self.fill(form, e, a, v)
            index, start = len(task.statements), self.place_of(form, text, v)
            begin = self.quote_from(form, start, e, a)
            task.statements.append(Statement(text, record))
            end, answer = start + len(v), v
            if begin == start and "{e}" in form:
                end = max(end, text.rindex(e) + len(e))
            draw = rng.random()
            if draw < 0.5 * BACKWARDS[self.half]:
                if "{e}" not in form:
                    continue
                core, answer = self.fill(rng.choice(words.subject_questions), e, a, v), e
                begin, end = self.around(text, v, e)
            elif draw < 0.37:
                core = self.fill(self.wild_question(rng, rng.choice(words.keywords)), e, a)
            else:
                core = self.fill(self.wild_question(rng, rng.choice(words.questions)), e, a)
            question = self.ask(rng, core)
            if rng.random() < 0.06:
                question += rng.choice(words.sentence_instructions)
                begin, end = 0, len(text)
            task.questions.append(Question(question, answer, (index,), (index, begin, end)))
        return task

    def relations(self, rng: random.Random, length: int) -> Task:
        """Facts said with verbs, asked by what they mean; several of one relation, or of several."""
        words = self.words
        num = max(2, min(20, length // rng.choice((40, 48, 64, 100, 300))))
        known = grammar.relations() if self.wild and rng.random() < 0.6 else words.relations
        chosen = rng.sample(known, min(len(known), rng.choice((1, 2, 4, 8))))
        task, used = Task("relations", [], []), set[str]()
        for _ in range(num):
            relation: Relation = rng.choice(chosen)
            e, v = entity(rng, words, relation.subject), self.value(rng, relation.value)
            if any(e in word or word in e or v in word or word in v for word in used) or e in v or v in e:
                continue
            used |= {e, v}
            form = rng.choice(relation.facts)
            text = self.fill(form, e, v=v)
            index = len(task.statements)
            task.statements.append(Statement(text, rng.random() < 0.2))
            if relation.inverse and rng.random() < BACKWARDS[self.half]:
                core, answer, known = self.fill(rng.choice(relation.inverse), v=v), e, v
            else:
                core, answer, known = self.fill(rng.choice(relation.questions), e), v, e
            source = (index, *self.around(text, answer, known))
            task.questions.append(Question(self.ask(rng, core), answer, (index,), source))
        return task

    def table(self, rng: random.Random, length: int) -> Task:
        """A table of entities and their attributes, in one block or, for JSON and YAML, scattered."""
        words, style = self.words, rng.choice(self.words.tables)
        kind = "person" if rng.random() < 0.5 else rng.choice(list(words.things))
        columns = self.distinct(rng, rng.randint(2, 4), lambda rng: self.attribute(rng)[0])
        kinds = {a: rng.choice((*words.value_kinds, *words.pools)) for a in columns}
        names = self.distinct(
            rng, max(2, min(12, length // rng.choice((70, 120)))), lambda rng: entity(rng, words, kind)
        )
        task = Task("table", [], [], in_order=True, spread=style in ("json", "yaml", "ini") and rng.random() < 0.5)
        head = {
            "markdown": "| name | {} |",
            "csv": "name,{}",
            "tsv": "name\t{}",
            "html": "<tr><th>name</th><th>{}</th></tr>",
        }
        joints = {"markdown": " | ", "csv": ",", "tsv": "\t", "html": "</th><th>"}
        if style in head:
            task.statements.append(Statement(head[style].format(joints[style].join(columns)), True))
        for e in names:
            cells = {a: self.value(rng, kinds[a]) for a in columns}
            text, starts = self.row(style, e, cells)
            index = len(task.statements)
            task.statements.append(Statement(text, True))
            for a in rng.sample(columns, rng.choice((1, 1, 2))):
                core = self.fill(self.wild_question(rng, rng.choice((*words.questions, *words.keywords))), e, a)
                evidence = (index,) if style not in head else (0, index)
                source = (index, text.index(e), starts[a] + len(cells[a]))
                task.questions.append(Question(self.ask(rng, core), cells[a], evidence, source))
        return task

    @staticmethod
    def row(style: str, e: str, cells: Mapping[str, str]) -> tuple[str, dict[str, int]]:
        """One row, and where each cell's value begins in it."""
        begin = {
            "markdown": "| {}",
            "csv": "{}",
            "tsv": "{}",
            "html": "<tr><td>{}</td>",
            "json": '{{"name": "{}"',
            "yaml": "- name: {}",
            "ini": "[{}]",
        }[style]
        cell = {
            "markdown": " | {v}",
            "csv": ",{v}",
            "tsv": "\t{v}",
            "html": "<td>{v}</td>",
            "json": ', "{k}": "{v}"',
            "yaml": "\n  {k}: {v}",
            "ini": "\n{k} = {v}",
        }[style]
        end = {"markdown": " |", "html": "</tr>", "json": "}"}.get(style, "")
        text, starts = begin.format(e), {}
        for a, v in cells.items():
            filled = cell.format(k=as_identifier(a).lower(), v=v)
            starts[a] = len(text) + filled.rindex(v)
            text += filled
        return text + end, starts

    def several_values(self, rng: random.Random, length: int) -> Task:
        """Two to four values of one attribute, all of them asked for in the order of the text."""
        words = self.words
        e, other = self.distinct(rng, 2, self.entity)
        a, kind = self.attribute(rng)
        values = self.distinct(rng, rng.randint(2, 4), lambda rng: self.value(rng, kind))
        form = rng.choice(words.statements)
        task = Task("several values", [Statement(self.fill(form, e, a, v)) for v in values], [], in_order=True)
        task.statements.append(Statement(self.fill(form, other, a, self.value(rng, kind))))
        core = self.fill(rng.choice(words.several_questions), e, a)
        task.questions.append(Question(self.ask(rng, core), " " + ", ".join(values), tuple(range(len(values)))))
        return task

    def split(self, rng: random.Random, length: int) -> Task:
        """A fact over two sentences: who is meant, then the value."""
        words, task = self.words, Task("split", [], [])
        for e in self.distinct(rng, max(1, min(10, length // rng.choice((70, 130)))), self.entity):
            a, kind = self.attribute(rng)
            v = self.value(rng, kind)
            first, second = rng.choice(words.split)
            head = self.fill(first, e) + " "
            tail = self.fill(second, e, a, v)
            index, start = len(task.statements), len(head) + self.place_of(second, tail, v)
            task.statements.append(Statement(head + tail, rng.random() < 0.3))
            core = self.fill(self.wild_question(rng, rng.choice((*words.questions, *words.keywords))), e, a)
            source = (index, self.quote_from(first + " " + second, start, e, a), start + len(v))
            task.questions.append(Question(self.ask(rng, core), v, (index,), source))
        return task

    def stories(self, rng: random.Random, length: int) -> Task:
        """People who move and take things; where they are last, and who has what."""
        words, task = self.words, Task("stories", [], [], in_order=True, spread=rng.random() < 0.5)
        people = self.distinct(rng, rng.randint(2, 5), lambda rng: rng.choice(words.first_names))
        things = list(rng.sample(words.pools["object"], 6))
        last: dict[str, tuple[int, str]] = {}
        holds: dict[str, tuple[int, str]] = {}
        for _ in range(rng.randint(3, 10)):
            p = rng.choice(people)
            index = len(task.statements)
            if things and rng.random() < 0.3:
                o = things.pop()
                task.statements.append(Statement(rng.choice(words.takes).format(p=p, o=o)))
                holds[o] = index, p
            else:
                place = rng.choice(self.places)
                task.statements.append(Statement(rng.choice(words.moves).format(p=p, l=place)))
                last[p] = index, place
        for forms, found, key in ((words.where, last, "p"), (words.carries, holds, "o")):
            for asked, (index, answer) in found.items():
                core = rng.choice(forms).format(**{key: asked})
                source = (index, *self.around(task.statements[index].text, answer, asked))
                task.questions.append(Question(self.ask(rng, core), answer, (index,), source))
        return task

    def passage(self, rng: random.Random, least: int, most: int) -> str:
        """A sentence or line of the haystack, of so many words and without quotation marks."""
        for _ in range(30):
            ids = self.haystack(rng, 240)
            for piece in re.split(r"(?<=[.!?])\s+|\n+", self.tokenizer.decode(ids.tolist()))[1:-1]:
                text = " ".join(piece.split())
                if least <= len(text.split()) <= most and '"' not in text and text.isascii():
                    return text
        return "The " + " ".join(rng.choice(self.words.pools["object"]) for _ in range(least)) + "."

    def copying(self, rng: random.Random, length: int) -> Task:
        """Sentences of real text, to be said again."""
        task = Task("copy", [], [])
        for text in self.distinct(rng, max(1, min(6, length // 200)), lambda rng: self.passage(rng, 7, 22)):
            index = len(task.statements)
            task.statements.append(Statement(text, rng.random() < 0.5))
            opening = " ".join(text.split()[: rng.randint(3, 4)])
            core = rng.choice(self.words.copies).format(s=opening)
            task.questions.append(Question(core, text, (index,), (index, 0, len(text))))
        return task

    def editing(self, rng: random.Random, length: int) -> Task:
        """Sentences of real text, to be said again with one word changed."""
        task = Task("edit", [], [])
        for text in self.distinct(rng, max(1, min(4, length // 200)), lambda rng: self.passage(rng, 7, 18)):
            index = len(task.statements)
            task.statements.append(Statement(text, rng.random() < 0.5))
            parts = text.split()
            old = rng.choice([part for part in parts[4:] if part.isalpha()] or parts[-1:])
            new = rng.choice(self.words.pools["object"])
            core = rng.choice(self.words.edits).format(s=" ".join(parts[:3]), o=old, n=new)
            answer = " " + " ".join(new if part == old else part for part in parts)
            task.questions.append(Question(core, answer, (index,)))
        return task

    def cloze(self, rng: random.Random, length: int) -> Task:
        """How a sentence of real text goes on."""
        task = Task("cloze", [], [])
        for text in self.distinct(rng, max(1, min(10, length // 100)), lambda rng: self.passage(rng, 8, 24)):
            index = len(task.statements)
            task.statements.append(Statement(text, rng.random() < 0.3))
            parts = text.split()
            cut = rng.randint(4, max(4, len(parts) - 3))
            begin = max(0, cut - rng.randint(3, 6))
            head = " ".join(parts[:cut])
            answer = " ".join(parts[cut : cut + 3])
            core = rng.choice(self.words.clozes).format(s=" ".join(parts[begin:cut]))
            source = (index, len(" ".join(parts[:begin])) + (begin > 0), len(head) + 1 + len(answer))
            task.questions.append(Question(core, answer, (index,), source))
        return task

    def definitions(self, rng: random.Random, length: int) -> Task:
        """Functions with parameters, as source code has them; the parameters are asked for."""
        words, task = self.words, Task("definitions", [], [])
        verbs = {"train": ("get", "set", "load", "make", "find", "read"), "test": ("fetch", "merge", "emit", "probe")}
        nouns = words.pools["object"]

        def name(rng: random.Random) -> str:
            return f"{rng.choice(verbs[self.half])}_{rng.choice(nouns)}"

        for function in self.distinct(rng, max(1, min(10, length // rng.choice((60, 120)))), name):
            parameters = ", ".join(rng.sample(nouns, rng.randint(1, 3)))
            text = f"def {function}({parameters}):"
            index, start = len(task.statements), len(function) + 5
            task.statements.append(Statement(text, True))
            core = rng.choice(words.definitions).format(f=function)
            source = (index, len("def "), start + len(parameters))
            task.questions.append(Question(self.ask(rng, core), parameters, (index,), source))
        return task

    def chains(self, rng: random.Random, length: int) -> Task:
        """Variables that are set to variables; the answer says the steps, then the value."""
        words, task = self.words, Task("chains", [], [], in_order=True)
        letters = "abcdkmnp" if self.half == "train" else "qrstuvwz"
        names = rng.sample([f"{letter}{digit}" for letter in letters for digit in range(1, 10)], 12)
        first, then, ask = rng.choice(words.chains)
        for chain in range(rng.randint(1, 3)):
            own = names[chain * 4 : chain * 4 + rng.randint(2, 4)]
            v = number(rng, 3, 5)
            begin = len(task.statements)
            task.statements.append(Statement(first.format(x=own[0], v=v)))
            task.statements += [Statement(then.format(x=x, y=y)) for x, y in itertools.pairwise(own)]
            steps = " = ".join([*reversed(own), v])
            evidence = tuple(range(begin, len(task.statements)))
            task.questions.append(Question(ask.format(x=own[-1]), " " + steps, evidence))
        return task

    def counting(self, rng: random.Random, length: int) -> Task:
        """How often the same line stands in the document: one to nine times."""
        form, ask = rng.choice(self.words.counts)
        task = Task("counting", [], [])
        for e in self.distinct(rng, rng.randint(1, 3), self.entity):
            num = rng.randint(1, 9)
            begin = len(task.statements)
            task.statements += [Statement(form.format(e=e), True)] * num
            task.questions.append(Question(ask.format(e=e), f" {num}", tuple(range(begin, begin + num))))
        return task

    def common(self, rng: random.Random, length: int) -> Task:
        """The most common word of a list."""
        form, ask = rng.choice(self.words.commons)
        words = rng.sample(self.words.pools["object"], rng.randint(3, 8))
        most = rng.randint(3, max(3, min(length // 40, 12)))
        drawn = [words[0]] * most + [word for word in words[1:] for _ in range(rng.randint(1, most - 1))]
        rng.shuffle(drawn)
        joint = rng.choice((" ", ", "))
        return Task(
            "common", [Statement(form.format(list=joint.join(drawn)), True)], [Question(ask, f" {words[0]}", (0,))]
        )

    # -- assembly ----------------------------------------------------------------------------------------------

    def haystack(self, rng: random.Random, length: int) -> np.ndarray:
        """Consecutive tokens of one kind of text, without special tokens."""
        ids = self.haystacks[rng.choice(list(self.haystacks))]
        while len(ids) <= length + 1:
            ids = np.concatenate((ids, ids))
        start = rng.randrange(len(ids) - length)
        piece = ids[start : start + length].astype(np.int64)
        return piece[piece > END]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_statement(self, rng: random.Random, statement: Statement) -> Coded:
        """Its ids, the characters of each, and how many characters stand before the text itself."""
        before = "\n" if statement.own_line else " "
        after = "\n" if statement.own_line and rng.random() < 0.8 else ""
        coded = self.tokenizer.encode(before + statement.text + after, add_special_tokens=False)
        return coded.ids, coded.offsets, len(before)

    def place(
        self, rng: random.Random, haystack: np.ndarray, pieces: list[list[int]], task: Task
    ) -> tuple[list[int], list[int]]:
        """The document, and where each piece begins in it."""
        num = len(pieces)
        if task.spread:
            drawn = [rng.randint(0, len(haystack)) for _ in range(num)]
            order = sorted(drawn) if task.in_order else drawn
        else:
            order = [rng.randint(0, len(haystack))] * num
        ends = np.flatnonzero(self.ends_sentence[haystack]) + 1 if len(haystack) else np.array([0])
        document: list[int] = []
        starts = [0] * num
        last = 0
        for wanted, index in sorted((at, index) for index, at in enumerate(order)):
            after = int(np.searchsorted(ends, wanted))
            at = int(ends[after]) if after < len(ends) and ends[after] - wanted < 48 else wanted
            at = max(at, last)
            document += haystack[last:at].tolist()
            starts[index] = len(document)
            document += pieces[index]
            last = at
        return document + haystack[last:].tolist(), starts

    def assemble(self, rng: random.Random, task: Task, length: int, num_questions: int | None = None) -> Made:
        """A chat of at most about `length` tokens: the document with the statements, then the questions in turns."""
        words = self.words
        coded = [self.encode_statement(rng, statement) for statement in task.statements]
        asked = task.questions[:]
        rng.shuffle(asked)
        asked = asked[: num_questions or self.max_questions]
        first = rng.random()
        texts = [self.encode(question.text) for question in asked]
        answers = [self.answer_ids(question, coded) for question in asked]
        room = length - sum(len(ids) for ids, *_ in coded) - 24
        share = rng.choice((0.6, 0.95, 0.95))  # of the room that is left for questions; the rest is filled with text

        def num_asked() -> int:
            return sum(map(len, texts)) + sum(len(ids) for ids, _ in answers) + 5 * len(asked)

        while len(asked) > 1 and num_asked() > share * room:
            for parts in (asked, texts, answers):
                parts.pop()
        room -= num_asked()
        haystack = self.haystack(rng, room) if room > 16 else np.zeros(0, dtype=np.int64)
        document, starts = self.place(rng, haystack, [ids for ids, *_ in coded], task)
        head, between, questions = [BOS, USER], list[int](), list[list[int]]()
        for index, ids in enumerate(texts):
            questions.append(ids if index else [*self.encode("\n\n"), *ids])
        if first < 0.12:  # the question before the document
            form = rng.choice(words.before).format(q=asked[0].text)
            head += self.encode(form + "\n\n")
            questions[0] = []
        elif first < 0.3:  # the document is an earlier turn
            between = [END, ASSISTANT, *self.encode(rng.choice(words.acknowledgements)), END, USER]
            if rng.random() < 0.5:
                head += self.encode(rng.choice(words.tool_results) + "\n")
            questions[0] = questions[0][len(self.encode("\n\n")) :]
        offset = len(head)
        ids = [*head, *document, *between]
        made = Made(task.kind, Sequence(ids, [0.0] * len(ids), tail=len(ids)), asked, [], [])
        spans = [(offset + start, offset + start + len(piece[0])) for start, piece in zip(starts, coded, strict=True)]
        for index, (question, ask_ids, (answer, origin)) in enumerate(zip(asked, questions, answers, strict=True)):
            self.turn(made, question, [USER] * (index > 0) + ask_ids, answer, origin, spans)
        return made

    def turn(
        self,
        made: Made,
        question: Question,
        ask_ids: list[int],
        answer: list[int],
        origin: int | None,
        spans: list[tuple[int, int]],
    ) -> None:
        """Add one question and its answer to the sequence, with its links and copies."""
        sequence = made.sequence
        sequence.ids += [*ask_ids, END, ASSISTANT]
        sequence.weights += [0.0] * (len(ask_ids) + 2)
        at = len(sequence.ids)
        sequence.ids += [*answer, END]
        sequence.weights += [2.0, *[1.0] * len(answer)]
        evidence = [spans[index] for index in question.evidence]
        made.spans.append(evidence)
        made.answers.append((at, at + len(answer)))
        if len(evidence) <= 2:
            for start, end in evidence:
                sequence.links += [(query, start, end) for query in range(at - 1, at + len(answer) - 1)]
        if origin is not None and question.source is not None:
            begin = spans[question.source[0]][0] + origin
            sequence.copies += [(at - 1 + index, begin + index) for index in range(len(answer))]

    def answer_ids(self, question: Question, coded: list[Coded]) -> tuple[list[int], int | None]:
        """The tokens of an answer, and where they begin in the statement they are copied from."""
        if question.source is None:
            return self.encode(question.answer), None
        index, start, end = question.source
        ids, offsets, before = coded[index]
        inside = [at for at, (a, b) in enumerate(offsets) if a < end + before and b > start + before]
        return [ids[at] for at in inside], inside[0]

    def task(self, rng: random.Random, length: int, kind: str | None = None) -> Task:
        """A task of a kind, or of a kind drawn by weight."""
        for _ in range(20):
            name = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
            task = self.kinds[name](rng, length)
            if task.questions:
                return task
        raise RuntimeError(f"no question came of 20 tries at {kind!r}")

    def made(self, rng: random.Random, length: int, kind: str | None = None, num_questions: int | None = None) -> Made:
        """A finished task of at most length + 1 tokens, unless its statements need more."""
        made = self.assemble(rng, self.task(rng, length, kind), length + 1, num_questions)
        for _ in range(7):
            if len(made.sequence.ids) <= length + 1:
                break
            made = self.assemble(rng, self.task(rng, length, kind), length + 1, num_questions)
        return made
