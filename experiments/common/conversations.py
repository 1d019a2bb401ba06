"""Conversations about one long document with several facts in it, each asked for in a turn of its own.

The facts have five wordings that the embedded pair was trained on: the first question does not look like the facts of
the later ones, so that pruning for it drops them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from spec_stack.calibrate.documents import MODULES, module_source

_ADJECTIVES = ("red", "blue", "golden", "hidden", "silver", "quiet", "royal", "bright", "plain", "rare", "cold", "main")
_NAMES = (
    *("Alice", "Bruno", "Carla", "Daniel", "Elena", "Felix", "Greta", "Hassan", "Irene", "Jonas", "Maria", "Oscar"),
    *("Agnes", "Basil", "Celia", "Dennis", "Edith", "Fred", "Gloria", "Harold"),
)
_CITIES = (
    *("London", "Paris", "Tokyo", "Berlin", "Madrid", "Cairo"),
    *("Lima", "Oslo", "Dublin", "Vienna", "Prague", "Rome"),
)
_WORDS = ("apple", "river", "window", "paper", "music", "captain", "bridge", "market", "candle", "guitar", "kettle")
_WORDINGS = (
    ("The {a} code for {n} is {v}.", "What is the {a} code for {n}?", "v"),
    ("{n} lives in {c}.", "Where does {n} live?", "c"),
    ("The favourite word of {n} is {w}.", "What is the favourite word of {n}?", "w"),
    ("{N}_KEY = {v}", "What is the value of {N}_KEY?", "v"),
    ("{n} has {v} points.", "How many points does {n} have?", "v"),
)


@dataclass(frozen=True)
class Fact:
    """text stands in the document on a line of its own."""

    text: str
    question: str
    answer: str


@dataclass(frozen=True)
class FactsConversation:
    """The first facts are those asked for, in order."""

    document: str
    facts: list[Fact]

    def ask(self, turn: int, history: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages of a turn, given those of the turns before and their answers."""
        question = self.facts[turn].question
        content = f"{self.document}\n\n{question}" if turn == 0 else question
        return [*history, {"role": "user", "content": content}]


def make_conversation(tokenizer: Any, num_tokens: int, num_facts: int, seed: int) -> FactsConversation:
    """Facts about different people, at random places of about num_tokens tokens of a standard-library module."""
    rng = random.Random(f"mixed {seed}")
    source = module_source(MODULES[seed % len(MODULES)])
    start = rng.randrange(max(1, len(source) - 6 * num_tokens))
    token_ids = tokenizer(source[start : start + 6 * num_tokens], add_special_tokens=False, verbose=False).input_ids
    if len(token_ids) < num_tokens:
        raise ValueError(f"the module has {len(token_ids)} tokens, fewer than the {num_tokens} asked for")
    lines = tokenizer.decode(token_ids[:num_tokens]).split("\n")
    facts = []
    for index, name in enumerate(rng.sample(_NAMES, num_facts)):
        text, question, kind = _WORDINGS[index % len(_WORDINGS)]
        slots = {
            "a": rng.choice(_ADJECTIVES),
            "n": name,
            "N": name.upper(),
            "v": str(rng.randint(10000, 99999)),
            "c": rng.choice(_CITIES),
            "w": rng.choice(_WORDS),
        }
        facts.append(Fact(text.format(**slots), question.format(**slots), slots[kind]))
    for fact, line in sorted(
        zip(facts, rng.sample(range(len(lines)), num_facts), strict=True), key=lambda each: -each[1]
    ):
        lines.insert(line, fact.text)
    rng.shuffle(facts)
    return FactsConversation("\n".join(lines), facts)
