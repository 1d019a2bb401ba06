"""A task as a document of real text with its statements in it, and a chat that asks about it, in tokens.

Each answer says where its evidence stands (`links`), and each copied token where it was copied from (`copies`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from experiments.pair.model import ASSISTANT, BOS, END, USER
from experiments.pair.tasks import Sequence
from experiments.pair.wording import Wording

# A statement's token ids, the characters of each, and how many characters stand before its text.
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


class DocumentMaker:
    """Hides statements in real text, and asks about them in turns.

    Parameters
    ----------
    tokenizer, haystacks, max_questions
        As of `questions.QuestionMaker`.
    words
        The half of the wording that frames the questions.
    """

    def __init__(
        self, tokenizer: Tokenizer, haystacks: Mapping[str, np.ndarray], words: Wording, max_questions: int
    ) -> None:
        self.tokenizer, self.haystacks, self.words, self.max_questions = tokenizer, haystacks, words, max_questions
        texts = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
        self.ends_sentence = np.array([text.endswith((".", "?", "!", "\n")) for text in texts])

    def haystack(self, rng: random.Random, length: int) -> np.ndarray:
        """Consecutive tokens of one kind of text, without special tokens."""
        ids = self.haystacks[rng.choice(list(self.haystacks))]
        while len(ids) <= length + 1:
            ids = np.concatenate((ids, ids))
        start = rng.randrange(len(ids) - length)
        piece = ids[start : start + length].astype(np.int64)
        return piece[piece > END]

    def passage(self, rng: random.Random, least: int, most: int) -> str:
        """A sentence or line of the haystack, of so many words and without quotation marks."""
        for _ in range(30):
            ids = self.haystack(rng, 240)
            for piece in re.split(r"(?<=[.!?])\s+|\n+", self.tokenizer.decode(ids.tolist()))[1:-1]:
                text = " ".join(piece.split())
                if least <= len(text.split()) <= most and '"' not in text and text.isascii():
                    return text
        return "The " + " ".join(rng.choice(self.words.pools["object"]) for _ in range(least)) + "."

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
