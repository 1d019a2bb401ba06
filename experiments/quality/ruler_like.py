"""Haystacks after RULER's tasks whose evidence is everywhere: variable chains, common words, frequent words.

As `prefill.needles` makes single needles, each in a wording to tune on ("tuning") and another one to test on ("test").
The evidence of a chain is its assignments; that of the words is every occurrence of the words asked for, since they
can only be counted if all are seen. After NVIDIA/RULER (https://arxiv.org/abs/2404.06654); no line of it is copied.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from spec_stack.calibrate.needles import Haystack, Span

Half = Literal["tuning", "test"]
KINDS = ("vt", "cwe", "fwe")
_NOISE = {
    "tuning": "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "test": "Rain fell on the roof. The kettle sang. A dog barked twice. Nobody came. Evening went by slowly.",
}
_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "pra", "sti", "tor", "vel", "wim", "xan", "zo", "ger", "hul", "dri", "fas")


@dataclass(frozen=True)
class Asked:
    """A haystack with all of its answers. haystack.answer is the first of them."""

    haystack: Haystack
    answers: tuple[str, ...]


def make(kind: str, num_characters: int, half: Half, rng: random.Random) -> Asked:
    """One haystack of about so many characters. Raises ValueError for an unknown kind."""
    if kind not in _MAKERS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(_MAKERS)}")
    return _MAKERS[kind](num_characters, half, rng)


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))


def _words(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_SYLLABLES) for _ in range(3))] = None
    return list(found)


def _chain(num_characters: int, half: Half, rng: random.Random) -> Asked:
    names, value = [_name(rng) for _ in range(5)], str(rng.randint(10000, 99999))
    if half == "tuning":
        links = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
        question = f"Find all variables that are assigned the value {value} in the text above."
    else:
        links = [f"let {names[0]} be {value};", *(f"let {b} be {a};" for a, b in itertools.pairwise(names))]
        question = f"Which names stand for {value} in the text above? List every one."
    noise = _NOISE[half]
    lines = [noise] * max(len(links), round(num_characters / (len(noise) + 1)))
    for place, link in zip(sorted(rng.sample(range(len(lines)), len(links)), reverse=True), links[::-1], strict=True):
        lines.insert(place, link)
    return _asked("vt", lines, set(links), question, names)


def _common(num_characters: int, half: Half, rng: random.Random) -> Asked:
    size = max(2, round(num_characters / 14 / (10 * 30 + 3 * 90)))
    words = _words(rng, 100)
    common, rest = words[:10], words[10:]
    listed = common * (30 * size) + rest * (3 * size)
    rng.shuffle(listed)
    asks = {
        "tuning": "What are the 10 most common words in the above list?",
        "test": "Name the ten words that the list repeats most often.",
    }
    sign = ". " if half == "tuning" else ") "
    # As many as fit; a shorter list keeps the proportions by chance.
    lines, length = [], 0
    for number, word in enumerate(listed, 1):
        line = f"{number}{sign}{word}"
        length += len(line) + 1
        if length > num_characters:
            break
        lines.append(line)
    wanted = {line for line in lines if line.rsplit(" ", 1)[1] in common}
    return _asked("cwe", lines, wanted, asks[half], common)


def _frequent(num_characters: int, half: Half, rng: random.Random) -> Asked:
    words = _words(rng, 60)
    # A Zeta law with exponent 2, as RULER's.
    weights = [1 / (rank + 1) ** 2 for rank in range(len(words))]
    count = max(60, round(num_characters / 9))
    drawn = rng.choices(words, weights, k=count)
    asks = {
        "tuning": "What are the three most frequently appeared words in the above coded text?",
        "test": "Which three words does the coded text use most? Ignore the dots.",
    }
    lines = [" ".join(part for part in drawn[start : start + 12]) for start in range(0, count, 12)]
    top = set(words[:3])
    document = "\n".join(lines)
    spans: list[Span] = []
    start = 0
    for word in document.replace("\n", " ").split(" "):
        if word in top:
            spans.append((start, start + len(word)))
        start += len(word) + 1
    return Asked(Haystack("fwe", document, asks[half], words[0], tuple(spans)), tuple(words[:3]))


def _asked(kind: str, lines: Sequence[str], evidence: set[str], question: str, answers: Sequence[str]) -> Asked:
    spans, start = [], 0
    for line in lines:
        if line in evidence:
            spans.append((start, start + len(line)))
        start += len(line) + 1
    return Asked(Haystack(kind, "\n".join(lines), question, answers[0], tuple(spans)), tuple(answers))


_MAKERS: dict[str, Callable[[int, Half, random.Random], Asked]] = {"vt": _chain, "cwe": _common, "fwe": _frequent}
