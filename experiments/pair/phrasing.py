"""The words of a task, drawn from one half of `wording`: forms of facts, attributes, entities, values, questions.

In training most of them come from a grammar (`grammar`) and from the words of the texts themselves (`wild`), so that
nothing is learned by its wording.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

import numpy as np
from tokenizers import Tokenizer

from experiments.pair import grammar
from experiments.pair.values import entity, number, value
from experiments.pair.wording import PLACES, WORDINGS, Wording, listed

# What chatter is half made of.
_SMALL_WORDS = listed(
    """the, a, I, you, we, it, this, that, and, or, to, of, in, on, with, for, is, was, are, be, can, could, will,
    would, have, had, please, thank, not, only, more, very, so, if, when, what, how, who, one, two, some, any, all, my,
    your, about, from, at, by"""
)


def as_identifier(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def all_words(words: Wording) -> set[str]:
    """Every word that a half's entities, attributes and values are made of."""
    texts = [*words.first_names, *words.surnames, *words.qualifiers, *words.nouns]
    texts += [part for heads, tails, _ in words.things.values() for part in (*heads, *tails)]
    texts += [text for group in (words.pools, words.word_attributes) for pool in group.values() for text in pool]
    return set(re.findall("[A-Za-z]+", " ".join(texts)))


def wild_words(tokenizer: Tokenizer, haystacks: Mapping[str, np.ndarray], num_tokens: int = 150_000) -> list[str]:
    """Words of the haystacks that the other half does not use: so that a name need not be a known one."""
    found: set[str] = set()
    for ids in haystacks.values():
        piece = ids[:num_tokens].astype(np.int64)
        found |= set(re.findall(r"(?<![A-Za-z])[A-Za-z]{4,10}(?![A-Za-z])", tokenizer.decode(piece.tolist())))
    kept_out = {word.lower() for word in all_words(WORDINGS["test"])}
    return sorted({word.lower() for word in found} - kept_out)


class Phrasing:
    """Draws words and forms. The same rng gives the same ones.

    Parameters
    ----------
    tokenizer
        The pair's, to read the texts with.
    haystacks
        Token ids of real text by kind. In training their words serve as names and values too.
    half
        "train" or "test".

    Raises
    ------
    ValueError
        The wording has no such half.
    """

    def __init__(self, tokenizer: Tokenizer, haystacks: Mapping[str, np.ndarray], half: str) -> None:
        if half not in WORDINGS:
            raise ValueError(f"the wording has the halves {sorted(WORDINGS)}, not {half!r}")
        self.half, self.words, self.places = half, WORDINGS[half], PLACES[half]
        self.wild = wild_words(tokenizer, haystacks) if half == "train" else []

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
