"""Long-context tasks made on the fly from a haystack of real text: facts to find, records, variables, words, passages.

Every task is a chat of one long context and several questions about it, as token ids, with a loss weight per token
and, for each answer token, where in the context its evidence stands ("links"): the signal is dense, and attention
can be supervised. Facts stand at any depth, after a sentence or as a line of their own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from experiments.pair.model import ASSISTANT, BOS, END, EOS, USER


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    Alice Bruno Carla Daniel Elena Felix Greta Hassan Irene Jonas Kavita Liam Maria Nadia Oscar Paula Quentin
    Rosa Samuel Tara Umar Vera Walter Xenia Yusuf Zoe Miriam Peter Anna Boris Clara David Emma Frank Gina Henry
    Ida Jack Karen Leo Mona Nina Otto Petra Ralph Sara Tom Ursula Victor Wendy Arthur Bella Conrad Dora Edwin
    Flora George Hilda Ivan Julia Kurt Laura Martin Norma Olga Philip Ruth Simon Thea Vincent Agnes Basil Celia
    Dennis Edith Fred Gloria Harold Iris James Kate Lewis Mabel Neil Olive Paul Rita Stephen Ada Bob Carol Dan
    Eve Grace Hugo Kim Mike Nora Sam Ted Tina Will Zack
    """
)
ADJECTIVES = _words(
    """
    red blue green silver golden secret hidden special magic ancient broken bright dark quiet loud heavy light
    simple final first second north south east west early late warm cold sweet bitter royal public private local
    common rare strange plain modern new old main spare
    """
)
NOUNS = _words("code code number password key token label pin")
CITIES = _words(
    """
    London Paris Tokyo Berlin Madrid Cairo Lima Oslo Dublin Vienna Prague Rome Athens Boston Chicago Denver
    Moscow Delhi Seoul Sydney Lisbon Warsaw Geneva Milan Bergen Quito Havana Tunis Dakar Accra
    """
)
COLORS = _words("red blue green yellow white black brown grey pink orange purple silver")
WORDS = _words(
    """
    apple table river stone house garden window paper letter music summer winter doctor captain school bridge
    forest market engine mirror button candle basket hammer ladder pocket ribbon saddle tunnel valley wagon
    anchor barrel carpet dragon feather guitar helmet island jacket kettle lemon marble needle onion pepper
    rabbit
    """
)
SYLLABLES = _words(
    """
    ba be bo da de do fa fi ga go ka ke ki la le li lo ma me mi mo na ne ni no pa pe ra re ri ro sa se so ta te
    ti to va ve vi za zo
    """
)
CODE_QUESTIONS = ["What is the {a} code for {n}?"] * 5 + [
    "Tell me the {a} code for {n}.",
    "Find the {a} code for {n}.",
    "Which code is the {a} code for {n}?",
    "What was the {a} code for {n}?",
    "Can you tell me the {a} code for {n}?",
]
# (fact, question): the answer repeats the fact.
FACTS = [
    ("The {a} {k} of {n} is {v}.", "What is the {a} {k} of {n}?"),
    ("{n}'s {a} {k} is {v}.", "What is {n}'s {a} {k}?"),
    ("The {k} for {n} is {v}.", "What is the {k} for {n}?"),
    ("{n} lives in {c}.", "Where does {n} live?"),
    ("The favourite word of {n} is {w}.", "What is the favourite word of {n}?"),
    ("{N}_{K} = {v}", "What is the value of {N}_{K}?"),
    ("{n} has {v} points.", "How many points does {n} have?"),
]


@dataclass
class Sequence:
    """Token ids, a loss weight for each as a label, and links (query index, evidence start, evidence end).

    copies: (query index, index) of the answer tokens that are copied: the token after the query stands at the index.
    tail: index of the first question; the tokens before it are context.
    """

    ids: list[int]
    weights: list[float]
    links: list[tuple[int, int, int]] = field(default_factory=list)
    tail: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Asked:
    question: str
    answer: str
    evidence: int | None = None  # index of the fact that holds the answer


class TaskMaker:
    """Draws tasks of a wanted length. The same rng gives the same tasks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        haystacks: Mapping[str, np.ndarray],
        passages: np.ndarray | None = None,
        *,
        answer_weight: float = 4.0,
        context_weight: float = 0.0,
        max_questions: int = 24,
    ) -> None:
        self.tokenizer, self.haystacks, self.passages = tokenizer, haystacks, passages
        self.answer_weight, self.context_weight, self.max_questions = answer_weight, context_weight, max_questions
        texts = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
        self.ends_sentence = np.array([text.endswith((".", "?", "!", "\n")) for text in texts])
        self.begins_line = np.array([text.startswith("\n") for text in texts])
        self.starts = np.flatnonzero(passages == BOS) if passages is not None else np.array([], dtype=int)
        self._encoded: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids = self._encoded.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._encoded) < 100_000:
                self._encoded[text] = ids
        return ids

    # -- pieces ------------------------------------------------------------------------------------------------

    def haystack(self, rng: random.Random, length: int) -> np.ndarray:
        names = list(self.haystacks)
        name = "code" if "code" in self.haystacks and rng.random() < 0.3 else rng.choice(names)
        ids = self.haystacks[name]
        while len(ids) <= length + 1:
            ids = np.concatenate((ids, ids))
        start = rng.randrange(len(ids) - length)
        piece = ids[start : start + length].astype(np.int64)
        return piece[piece > END]

    def name(self, rng: random.Random) -> str:
        if rng.random() < 0.7:
            return rng.choice(NAMES)
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()

    @staticmethod
    def number(rng: random.Random, shortest: int = 4, longest: int = 7) -> str:
        digits = rng.choice([5, rng.randint(shortest, longest)])
        return str(rng.randint(10 ** (digits - 1), 10**digits - 1))

    def names(self, rng: random.Random, num: int) -> list[str]:
        chosen: dict[str, None] = {}
        while len(chosen) < num:
            chosen[self.name(rng)] = None
        return list(chosen)

    def insert(
        self, rng: random.Random, haystack: np.ndarray, facts: list[str], offset: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Put each fact somewhere into the haystack; returns the context and each fact's span in it, from offset."""
        ends = np.flatnonzero(self.ends_sentence[haystack]) + 1
        lines = np.flatnonzero(self.begins_line[haystack])
        places = []
        for index, fact in enumerate(facts):
            own_line = len(lines) > 0 and rng.random() < 0.65
            near = lines if own_line else ends
            place = rng.randint(0, len(haystack))
            after = int(np.searchsorted(near, place))
            if after < len(near) and near[after] - place < 64:
                place = int(near[after])
            ids = [*self.encode("\n"), *self.encode(fact)] if own_line else self.encode(" " + fact)
            places.append((place, index, ids))
        context: list[int] = []
        spans = [(0, 0)] * len(facts)
        last = 0
        for place, index, ids in sorted(places):
            context += haystack[last:place].tolist()
            spans[index] = (offset + len(context), offset + len(context) + len(ids))
            context += ids
            last = place
        return context + haystack[last:].tolist(), spans

    def chat(self, rng: random.Random, length: int, facts: list[str], asked: list[Asked]) -> Sequence:
        """A chat over a haystack with the facts in it; about `length` tokens, never more unless the facts need it."""
        used = sum(len(self.encode(fact)) + 1 for fact in facts) + 4
        used += sum(len(self.encode(qa.question)) + len(self.encode(qa.answer)) + 6 for qa in asked)
        context, spans = self.insert(rng, self.haystack(rng, max(8, length - used)), facts, offset=2)
        sequence = Sequence([BOS, USER, *context], [self.context_weight] * (len(context) + 2), tail=len(context) + 2)
        for index, qa in enumerate(asked):
            head = [] if index == 0 else [USER]
            head += [*self.encode("\n\n" + qa.question if index == 0 else qa.question), END, ASSISTANT]
            answer = [*self.encode(qa.answer), END]
            sequence.ids += head + answer
            sequence.weights += [self.context_weight] * len(head) + [self.answer_weight] * len(answer)
            if qa.evidence is not None:
                first = len(sequence.ids) - len(answer) - 1
                sequence.links += [(query, *spans[qa.evidence]) for query in range(first, len(sequence.ids) - 2)]
        return sequence

    # -- tasks -------------------------------------------------------------------------------------------------

    def facts(self, rng: random.Random, length: int) -> Sequence:
        """Facts about people; some of them are asked for."""
        most = max(1, min(24, length // 80))
        num = rng.choice([1, 2, rng.randint(1, most), most, most])
        facts, asked = [], []
        for index, name in enumerate(self.names(rng, num)):
            adjective, value = rng.choice(ADJECTIVES), self.number(rng)
            if rng.random() < 0.65:
                fact = f"The {adjective} code for {name} is {value}."
                question = rng.choice(CODE_QUESTIONS).format(a=adjective, n=name)
            else:
                form, ask = rng.choice(FACTS)
                noun = rng.choice(NOUNS)
                slots = {"a": adjective, "n": name, "v": value, "k": noun, "c": rng.choice(CITIES)}
                slots |= {"N": name.upper(), "K": noun.upper(), "w": rng.choice(WORDS)}
                fact, question = form.format(**slots), ask.format(**slots)
            direct = value in fact and rng.random() < 0.15
            facts.append(fact)
            asked.append(Asked(question + " Reply with the number only." * direct, value if direct else fact, index))
        return self.chat(rng, length, facts, rng.sample(asked, min(num, self.max_questions)))

    def records(self, rng: random.Random, length: int) -> Sequence:
        """JSON records, in one block or scattered as lines, of which single fields are asked for."""
        num = max(2, min(24, (length - 90) // 60))
        rows = [
            (number, name, rng.choice(CITIES), rng.choice(COLORS), self.number(rng))
            for number, name in zip(rng.sample(range(10, 100), num), self.names(rng, num), strict=True)
        ]
        facts = [
            f'{{"id": {number}, "name": "{name}", "city": "{city}", "color": "{color}", "code": {code}}}'
            for number, name, city, color, code in rows
        ]
        asked = []
        for index in rng.sample(range(num), min(num, self.max_questions // 2)):
            row = rows[index]
            key, value = rng.choice([("city", row[2]), ("color", row[3]), ("code", row[4])])
            if rng.random() < 0.5:
                question, head = f'with name "{row[1]}"', f'"name": "{row[1]}"'
            else:
                question, head = f"with id {row[0]}", f'"id": {row[0]}'
            asked.append(Asked(f"What is the {key} of the record {question}?", f'{head} has "{key}": {value}', index))
        if rng.random() < 0.5:
            return self.chat(rng, length, facts, asked)
        return self.chat(rng, length, ["\n".join(facts)], [Asked(qa.question, qa.answer) for qa in asked])

    def variables(self, rng: random.Random, length: int) -> Sequence:
        """Chains of assignments; the value at the end of a chain is asked for."""
        num = rng.randint(1, 4)
        pool = rng.sample([f"{letter}{digit}" for letter in "abcdkmnpqstuvwxyz" for digit in range(1, 10)], num * 3)
        facts, asked = [], []
        for chain in range(num):
            names = pool[chain * 3 : chain * 3 + rng.randint(1, 3)]
            value = self.number(rng, 4, 6)
            steps = [f"{names[0]} = {value}"] + [f"{b} = {a}" for a, b in pairwise(names)]
            facts += [f"Let {step}." for step in steps]
            answer = "; ".join(reversed(steps)) + f". So {names[-1]} is {value}."
            asked.append(Asked(f"What is the value of {names[-1]}?", answer))
        rng.shuffle(asked)
        return self.chat(rng, length, facts, asked)

    def common(self, rng: random.Random, length: int) -> Sequence:
        """Which word is the most common of a list."""
        num = max(12, min(length // 4, 300))
        words = rng.sample(WORDS, rng.randint(4, 14))
        drawn = [words[0]] * int(num * rng.uniform(0.3, 0.5))
        drawn += [rng.choice(words[1:]) for _ in range(num - len(drawn))]
        rng.shuffle(drawn)
        asked = Asked("What is the most common word in the list of words?", f"The most common word is {words[0]}.")
        return self.chat(rng, length, ["Words: " + " ".join(drawn) + "."], [asked])

    def passage(self, rng: random.Random, length: int) -> Sequence:
        """A question-answering record of the corpus behind unrelated text."""
        if self.passages is None or len(self.starts) < 2:
            return self.facts(rng, length)
        at = rng.randrange(len(self.starts) - 1)
        record = self.passages[self.starts[at] + 2 : self.starts[at + 1]].astype(np.int64).tolist()
        if ASSISTANT not in record:  # a record of plain text
            return self.facts(rng, length)
        before = self.haystack(rng, max(8, length - len(record) - 4)).tolist()
        ids = [BOS, USER, *before, *self.encode("\n\n"), *record]
        answer = len(ids) - (len(record) - record.index(ASSISTANT) - 1)
        weights = [self.context_weight] * answer + [self.answer_weight] * (len(ids) - answer)
        return Sequence(ids, weights, tail=len(before) + 2)

    def sample(self, rng: random.Random, length: int) -> Sequence:
        draw = rng.random()
        if draw < 0.68:
            return self.facts(rng, length)
        if draw < 0.84:
            return self.records(rng, length)
        if draw < 0.92:
            return self.variables(rng, length)
        return self.passage(rng, length) if draw < 0.96 else self.common(rng, length)

    def sequence(self, rng: random.Random, length: int, linked: bool = False) -> Sequence:
        """A task of exactly `length` + 1 tokens (the last is only a label): cut or padded where it has to be.

        linked: only tasks that say where their evidence stands, as `drop_chunks` needs.
        """
        for _ in range(8):
            made = self.sample(rng, length + 1)
            if len(made.ids) <= length + 1 and (made.links or not linked):
                break
        if linked and not made.links:
            made = self.facts(rng, length + 1)
        del made.ids[length + 1 :], made.weights[length + 1 :]
        made.links = [link for link in made.links if link[0] < length]
        missing = length + 1 - len(made.ids)
        made.ids += [EOS] * missing
        made.weights += [0.0] * missing
        return made

    def repeats(self, rng: random.Random, length: int) -> Sequence:
        """Dense in-context copying, which makes induction heads form: random tokens or text, said again."""
        ids, weights = [BOS], [1.0]
        vocab = self.tokenizer.get_vocab_size()
        while len(ids) <= length:
            num = rng.randint(8, 48)
            text = rng.random() < 0.4
            piece = self.haystack(rng, num).tolist() if text else [rng.randrange(END + 1, vocab) for _ in range(num)]
            ids += piece
            weights += [float(text)] * len(piece)
            for _ in range(rng.randint(1, 4)):
                ids += piece
                weights += [0.5, *[2.0] * (len(piece) - 1)][: len(piece)]
        return Sequence(ids[: length + 1], weights[: length + 1])


def drop_chunks(rng: random.Random, sequence: Sequence, keep_rate: float, size: int = 32) -> tuple[Sequence, list[int]]:
    """What a sparsely prefilled model reads: the chunks with evidence, the ends, and random others; and the positions.

    Everything from the first question on is kept. Evidence is known by the links alone; an answer without one may lose
    it. A token that followed a gap is no label, since nobody can know it.
    """
    last = sequence.tail // size
    wanted = {0, last} | {
        chunk for _, start, end in sequence.links for chunk in range(start // size, (end - 1) // size + 1)
    }
    others = [chunk for chunk in range(1, last) if chunk not in wanted]
    room = max(0, round(keep_rate * last) - len(wanted))
    wanted |= set(rng.sample(others, min(room, len(others))))
    positions = [at for at in range(len(sequence.ids)) if at >= sequence.tail or at // size in wanted]
    index = {position: at for at, position in enumerate(positions)}
    jumped = {position for before, position in pairwise(positions) if position > before + 1}
    kept = Sequence(
        [sequence.ids[at] for at in positions],
        [0.0 if at in jumped else sequence.weights[at] for at in positions],
        [(index[query], index[start], index[end - 1] + 1) for query, start, end in sequence.links],
        index.get(sequence.tail, 0),
        [(index[query], index[at]) for query, at in sequence.copies if at in index],
    )
    return kept, positions
