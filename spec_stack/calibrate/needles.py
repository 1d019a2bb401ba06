"""Prompts with known evidence: the needles of `needles.toml`, hidden in long texts of a fitting kind. Text only.

`make_prompt_text(family, number, seed, texts, size)` is deterministic. One family's prompts need similar evidence, so
heads are judged on families that did not select them.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import Template

from spec_stack.calibrate.documents import PEOPLE, PORTS, flight_record, lines_of, log_stamp, of_size

Span = tuple[int, int]
_FILE = tomllib.loads(Path(__file__).with_name("needles.toml").read_text(encoding="utf-8"))
_NUMBERS: Mapping[str, Sequence[int]] = _FILE.pop("numbers")
_POOLS: Mapping[str, Sequence[str]] = {"person": PEOPLE, "port": PORTS, **_FILE.pop("pools")}
_REPEATED = 24
ALIKE = "alike"


@dataclass(frozen=True)
class Needle:
    """A hidden text with a question. evidence: lines needed for the answer, in order, each hidden at its own place.
    others: similar lines that are not needed."""

    evidence: tuple[str, ...]
    question: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Haystack:
    """A text with a needle. spans: half-open character spans of the evidence lines."""

    document: str
    question: str
    spans: tuple[Span, ...]


class _Fields(dict[str, str]):
    """A template's fields, each drawn once; `$person` and `$person2` are two people."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._left: dict[str, list[str]] = {}

    def __missing__(self, field: str) -> str:
        kind = field.rstrip("0123456789")
        if kind == "record":
            record = flight_record(self._rng)
            self.update({name: str(value) for name, value in record.items()})
            self[field] = json.dumps(record)
        elif kind == "stamp":
            self[field] = log_stamp(self._rng, self._rng.randrange(900))
        elif kind == "hex":
            self[field] = f"{self._rng.randrange(16**5):05x}"
        elif kind in _NUMBERS:
            self[field] = str(self._rng.randint(*_NUMBERS[kind]))
        else:
            pool = _POOLS[kind]
            self[field] = self._left.setdefault(kind, self._rng.sample(pool, len(pool))).pop()
        return self[field]

    def fill(self, template: str) -> str:
        return Template(template).substitute(self)


@dataclass(frozen=True)
class Wording:
    """Templates of a needle. repeated: it is one of many lines of the same template."""

    evidence: Sequence[str]
    question: str
    others: Sequence[str] = ()
    repeated: bool = False

    def needle(self, rng: random.Random) -> Needle:
        fields = _Fields(rng)
        lines = [fields.fill(line.lstrip("\n")) for line in self.evidence]
        others = [fields.fill(line) for line in self.others]
        question = fields.fill(self.question)
        if self.repeated:
            others += islice(self.alike(question, rng), _REPEATED - 1)
        return Needle(tuple(lines), question, tuple(others))

    def alike(self, question: str, rng: random.Random) -> Iterator[str]:
        """Lines of the same template, for other values than the question's, without end."""
        while True:
            other = _Fields(rng)
            line = other.fill(self.evidence[0])
            # The same question has one answer.
            if other.fill(self.question) != question:
                yield line


@dataclass(frozen=True)
class Family:
    """Needles of one kind. medium: the surrounding text; `ALIKE` is lines of the needle's own template."""

    medium: str
    needles: Sequence[Wording]


FAMILIES: Mapping[str, Family] = {
    name: Family(**{**family, "needles": [Wording(**needle) for needle in family["needles"]]})
    for name, family in _FILE.items()
}


def make_prompt_text(kind: str, number: int, seed: int, texts: Mapping[str, Sequence[str]], size: int) -> Haystack:
    """A document with a needle of a family, and its question.

    kind: a name of `FAMILIES`. number: cycles through the wordings. texts: documents for the media "text" and "code";
    other media are generated. size: characters without the needle, about.
    """
    rng = random.Random(f"{seed}/{kind}/{number}/{size}")
    family = FAMILIES[kind]
    wording = family.needles[number % len(family.needles)]
    needle = wording.needle(rng)
    if family.medium == ALIKE:
        return hide(needle, of_size(wording.alike(needle.question, rng), size), rng)
    return hide(needle, lines_of(family.medium, texts, size, rng), rng)


def hide(needle: Needle, lines: Sequence[str], rng: random.Random) -> Haystack:
    """Hide a needle's lines between a text's lines, at random places."""
    hidden = [(line, True) for line in needle.evidence] + [(line, False) for line in needle.others]
    places = [rng.randint(1, len(lines)) for _ in hidden]
    # Evidence keeps its order, so that a chain can be followed.
    places[: len(needle.evidence)] = sorted(places[: len(needle.evidence)])
    by_place: dict[int, list[tuple[str, bool]]] = {}
    for place, line in zip(places, hidden, strict=True):
        by_place.setdefault(place, []).append(line)
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for index, own in enumerate(lines, start=1):
        for text, is_evidence in [(own, False), *by_place.get(index, [])]:
            if is_evidence:
                spans.append((length, length + len(text)))
            pieces.append(text)
            length += len(text) + 1
    return Haystack("\n".join(pieces), needle.question, tuple(spans))
