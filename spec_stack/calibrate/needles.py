"""Prompts with known evidence: needles of several kinds and wordings hidden in long texts. Text only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]


@dataclass(frozen=True)
class Needle:
    """A hidden text with a question. evidence: lines needed for the answer, in order, each hidden at its own place.
    others: similar lines that are not needed. answer: contained in a correct answer."""

    evidence: tuple[str, ...]
    question: str
    answer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Haystack:
    """A text with a needle. spans: half-open character spans of the evidence lines."""

    kind: str
    document: str
    question: str
    answer: str
    spans: tuple[Span, ...]


Wording = Callable[[random.Random], Needle]

_PLACES = ("harbour", "attic", "orchard", "chapel", "cellar", "library", "kiln", "pavilion", "stable", "foundry")
_PEOPLE = ("Tomas", "Ingrid", "Rahul", "Beatrix", "Owen", "Leila", "Sven", "Amara", "Colin", "Yuki", "Petra", "Dario")
_THINGS = ("locker", "invoice", "ferry", "permit", "parcel", "ticket", "badge", "ledger", "sample", "voucher")


def _number(rng: random.Random) -> str:
    return str(rng.randint(10000, 99999))


def _fact_colon(rng: random.Random) -> Needle:
    thing, person, code = rng.choice(_THINGS), rng.choice(_PEOPLE), _number(rng)
    return Needle((f"The {thing} number of {person} is {code}.",), f"What is the {thing} number of {person}?", code)


def _fact_verb(rng: random.Random) -> Needle:
    place, person, code = rng.choice(_PLACES), rng.choice(_PEOPLE), _number(rng)
    line = f"On arrival {person} typed {code} to open the {place}."
    return Needle((line,), f"Which digits did {person} type to open the {place}?", code)


def _fact_note(rng: random.Random) -> Needle:
    thing, place, code = rng.choice(_THINGS), rng.choice(_PLACES), _number(rng)
    return Needle((f"NOTE: {place} {thing} = {code}",), f"Tell me the {place} {thing} from the note.", code)


def _paraphrase_job(rng: random.Random) -> Needle:
    town = rng.choice(("Lisbon", "Bergen", "Kyoto", "Quito", "Tunis", "Riga"))
    line = f"She had taken the early train and by noon was unpacking her instruments in {town}."
    return Needle((line,), "Where did the woman go to play music?", town)


def _paraphrase_price(rng: random.Random) -> Needle:
    price = str(rng.randint(120, 980))
    line = f"After some haggling the old clock changed hands for {price} crowns."
    return Needle((line,), "What did somebody pay to own the antique timepiece?", price)


def _paraphrase_pet(rng: random.Random) -> Needle:
    name = rng.choice(("Biscuit", "Rufus", "Pepper", "Ziggy", "Clover", "Mango"))
    line = f"Every evening the boy threw sticks for {name}, who never tired of fetching them."
    return Needle((line,), "What is the dog called?", name)


def _paraphrase_ill(rng: random.Random) -> Needle:
    name = rng.choice(("Marguerite", "Anselm", "Odile", "Casper", "Wanda", "Hugo"))
    line = f"{name} lay in bed with a fever for nine days and the doctor came twice."
    return Needle((line,), "Who was ill?", name)


def _paraphrase_food(rng: random.Random) -> Needle:
    dish = rng.choice(("lentils", "pancakes", "dumplings", "trout", "chestnuts", "porridge"))
    line = f"Before they set out, the cook handed round bowls of steaming {dish}."
    return Needle((line,), "What did everybody eat that morning?", dish)


def _paraphrase_age(rng: random.Random) -> Needle:
    years = str(rng.randint(31, 98))
    line = f"The old captain had blown out {years} candles on his cake last Sunday."
    return Needle((line,), "What age has the seaman reached?", years)


def _paraphrase_baker(rng: random.Random) -> Needle:
    name = rng.choice(("Marguerite", "Anselm", "Odile", "Casper", "Wanda", "Hugo"))
    line = f"{name} stood at the oven for forty years and sold warm bread to half of town."
    return Needle((line,), "Whose profession was making loaves?", name)


def _paraphrase_gate(rng: random.Random) -> Needle:
    colour = rng.choice(("green", "purple", "crimson", "turquoise", "ochre", "grey"))
    line = f"They had just painted their garden gate {colour} when it began to rain."
    return Needle((line,), "Which hue does the entrance have?", colour)


def _many_codes(rng: random.Random) -> Needle:
    pairs = rng.sample([(thing, person) for thing in _THINGS for person in _PEOPLE], 24)
    lines = [f"The {thing} code for {person} is {_number(rng)}." for thing, person in pairs]
    thing, person = pairs[0]
    return Needle((lines[0],), f"What is the {thing} code for {person}?", lines[0][-6:-1], tuple(lines[1:]))


def _many_rooms(rng: random.Random) -> Needle:
    pairs = rng.sample([(thing, place) for thing in _THINGS for place in _PLACES], 24)
    lines = [f"- {place}, {thing}: shelf {_number(rng)}" for thing, place in pairs]
    thing, place = pairs[0]
    return Needle((lines[0],), f"On which shelf is the {thing} of the {place}?", lines[0][-5:], tuple(lines[1:]))


def _values(rng: random.Random) -> Needle:
    person, codes = rng.choice(_PEOPLE), [_number(rng) for _ in range(3)]
    lines = tuple(f"One of the account numbers of {person} is {code}." for code in codes)
    return Needle(lines, f"List all account numbers of {person}.", codes[0])


def _chain(rng: random.Random) -> Needle:
    names = rng.sample([f"{letter}{digit}" for letter in "QWXYZ" for digit in range(10)], 4)
    value = _number(rng)
    links = [f"SET {names[0]} = {value}"] + [f"SET {b} = {a}" for a, b in pairwise(names)]
    return Needle(tuple(links), f"Which variables hold the value {value}, directly or through others?", names[-1])


def _log(rng: random.Random) -> Needle:
    request, code = f"req-{rng.randrange(16**6):06x}", rng.choice(("E104", "E207", "E311", "E402"))
    line = f"2026-03-{rng.randint(10, 28)}T0{rng.randint(1, 9)}:14:52Z WARN worker {request} failed with {code}"
    others = tuple(
        f"2026-03-{rng.randint(10, 28)}T0{rng.randint(1, 9)}:{rng.randint(10, 59)}:07Z INFO worker "
        f"req-{rng.randrange(16**6):06x} done"
        for _ in range(12)
    )
    return Needle((line,), f"With which error did {request} fail?", code, others)


def _record(rng: random.Random) -> Needle:
    people = rng.sample(_PEOPLE, 8)
    rows = [
        {"id": rng.randint(10000, 99999), "owner": person, "plot": rng.choice(_PLACES), "area": rng.randint(20, 900)}
        for person in people
    ]
    lines = [json.dumps(row) for row in rows]
    question = f"What is the area in the record owned by {people[0]}?"
    return Needle((lines[0],), question, str(rows[0]["area"]), tuple(lines[1:]))


def _constant(rng: random.Random) -> Needle:
    thing, value = rng.choice(_THINGS), _number(rng)
    name = f"MAX_{thing.upper()}_BYTES"
    return Needle((f"{name} = {value}",), f"What value does the code give to {name}?", value)


WORDINGS: dict[str, tuple[Wording, ...]] = {
    "fact": (_fact_colon, _fact_verb, _fact_note),
    "paraphrase": (
        _paraphrase_job,
        _paraphrase_price,
        _paraphrase_pet,
        _paraphrase_ill,
        _paraphrase_food,
        _paraphrase_age,
        _paraphrase_baker,
        _paraphrase_gate,
    ),
    "many facts": (_many_codes, _many_rooms),
    "values": (_values,),
    "chain": (_chain,),
    "log": (_log,),
    "record": (_record,),
    "code": (_constant,),
}
"""The needles of calibration, by kind. The same kinds in other words are for measuring what it chose."""


def hide(kind: str, needle: Needle, lines: Sequence[str], rng: random.Random) -> Haystack:
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
    return Haystack(kind, "\n".join(pieces), needle.question, needle.answer, tuple(spans))
