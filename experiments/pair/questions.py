"""Questions about long documents in many wordings: made on the fly, seeded, from one half of `wording`.

A task is a document of real text with statements in it, and questions whose answers are copied from those statements,
token for token (so a word that follows a space keeps it). An answer quotes its statement from what was asked about to
what was asked for ("Anna's locker is 4711"): a model that has said the first can find the second by going on as the
document does. The words come from `phrasing`, the tokens are made in `documents`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import numpy as np
from tokenizers import Tokenizer

from experiments.pair import grammar
from experiments.pair.documents import DocumentMaker, Made, Question, Statement, Task
from experiments.pair.phrasing import Phrasing, as_identifier
from experiments.pair.values import entity, number
from experiments.pair.wording import Relation

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


class QuestionMaker(Phrasing):
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
        super().__init__(tokenizer, haystacks, half)
        self.documents = DocumentMaker(tokenizer, haystacks, self.words, max_questions)
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

    def copying(self, rng: random.Random, length: int) -> Task:
        """Sentences of real text, to be said again."""
        task = Task("copy", [], [])
        for text in self.distinct(rng, max(1, min(6, length // 200)), lambda rng: self.documents.passage(rng, 7, 22)):
            index = len(task.statements)
            task.statements.append(Statement(text, rng.random() < 0.5))
            opening = " ".join(text.split()[: rng.randint(3, 4)])
            core = rng.choice(self.words.copies).format(s=opening)
            task.questions.append(Question(core, text, (index,), (index, 0, len(text))))
        return task

    def editing(self, rng: random.Random, length: int) -> Task:
        """Sentences of real text, to be said again with one word changed."""
        task = Task("edit", [], [])
        for text in self.distinct(rng, max(1, min(4, length // 200)), lambda rng: self.documents.passage(rng, 7, 18)):
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
        for text in self.distinct(rng, max(1, min(10, length // 100)), lambda rng: self.documents.passage(rng, 8, 24)):
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
        made = self.documents.assemble(rng, self.task(rng, length, kind), length + 1, num_questions)
        for _ in range(7):
            if len(made.sequence.ids) <= length + 1:
                break
            made = self.documents.assemble(rng, self.task(rng, length, kind), length + 1, num_questions)
        return made
