"""Made-up values and entities, by kind."""

from __future__ import annotations

import random
from collections.abc import Callable

from experiments.pair.wording import Wording

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")


def number(rng: random.Random, shortest: int, longest: int) -> str:
    """A whole number of so many digits, each length equally likely."""
    digits = rng.randint(shortest, longest)
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _letters(rng: random.Random, num: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(num))


def _identifier(rng: random.Random, words: Wording) -> str:
    forms = (
        lambda: f"{_letters(rng, rng.randint(1, 3))}-{number(rng, 2, 5)}",
        lambda: f"{_letters(rng, 2)}{number(rng, 3, 4)}",
        lambda: f"{number(rng, 2, 3)}-{_letters(rng, 2)}-{number(rng, 2, 3)}",
    )
    return rng.choice(forms)()


def _two_words(rng: random.Random, words: Wording) -> str:
    return f"{rng.choice(words.pools['colour'])} {rng.choice(words.pools['object'])}"


def _measure(rng: random.Random, words: Wording) -> str:
    return f"{number(rng, 1, 4)} {rng.choice(('km', 'kg', 'litres', 'volts', 'mm', 'hours'))}"


def _date(rng: random.Random, words: Wording) -> str:
    day, month, year = rng.randint(1, 28), rng.randrange(len(MONTHS)), rng.randint(1950, 2030)
    return rng.choice((f"{day} {MONTHS[month]} {year}", f"{year}-{month + 1:02d}-{day:02d}", f"{MONTHS[month]} {day}"))


MADE: dict[str, Callable[[random.Random, Wording], str]] = {
    "number": lambda rng, _: number(rng, 2, 6),
    "long number": lambda rng, _: number(rng, 5, 7),
    "identifier": _identifier,
    "date": _date,
    "name": lambda rng, words: person(rng, words),
    "two words": _two_words,
    "price": lambda rng, _: f"{number(rng, 1, 4)} {rng.choice(('dollars', 'euros', 'pounds', 'francs'))}",
    "decimal": lambda rng, _: f"{number(rng, 1, 3)}.{number(rng, 1, 2)}",
    "version": lambda rng, _: f"v{rng.randint(1, 12)}.{rng.randint(0, 40)}.{rng.randint(0, 9)}",
    "time": lambda rng, _: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
    "hex": lambda rng, _: f"{rng.getrandbits(24):06x}",
    "phone": lambda rng, _: f"0{number(rng, 2, 3)} {number(rng, 4, 5)}",
    "measure": _measure,
    "coordinate": lambda rng, _: f"{number(rng, 1, 2)},{number(rng, 1, 2)}",
}


def person(rng: random.Random, words: Wording) -> str:
    """A first name, a full name, or a made-up name."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(words.first_names)
    if draw < 0.8:
        return f"{rng.choice(words.first_names)} {rng.choice(words.surnames)}"
    if draw < 0.9:
        return f"{rng.choice(('Mr', 'Mrs', 'Dr'))} {rng.choice(words.surnames)}"
    return "".join(rng.choice(words.syllables) for _ in range(rng.randint(2, 3))).capitalize()


def thing(rng: random.Random, words: Wording, kind: str) -> str:
    """An entity of a kind of `Wording.things`."""
    heads, tails, joint = words.things[kind]
    return rng.choice(heads) + joint + rng.choice(tails)


def entity(rng: random.Random, words: Wording, kind: str) -> str:
    return person(rng, words) if kind == "person" else thing(rng, words, kind)


def value(rng: random.Random, words: Wording, kind: str) -> str:
    """A value of a kind: made, of a pool of words, or an entity."""
    if kind in MADE:
        return MADE[kind](rng, words)
    if kind in words.pools:
        return rng.choice(words.pools[kind])
    return entity(rng, words, kind)
