"""The kinds of `spec_stack.calibrate.needles` in words that calibration and tuning never saw."""

from __future__ import annotations

import json
import random
from itertools import pairwise

from spec_stack.calibrate.needles import Needle, Wording

_SHIPS = ("Meridian", "Corsair", "Albatross", "Halcyon", "Peregrine", "Borealis", "Vesper", "Calypso")
_STAFF = ("Nadia", "Gustav", "Imani", "Lorenzo", "Freya", "Kwame", "Mireille", "Anton", "Sunita", "Bjarne", "Odette")
_GOODS = ("copper", "saffron", "timber", "quartz", "linen", "barley", "amber", "cobalt", "indigo", "tallow")


def _digits(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999))


def _berth(rng: random.Random) -> Needle:
    ship, berth = rng.choice(_SHIPS), _digits(rng)
    return Needle(
        (f"Berth {berth} has been reserved for the {ship}.",), f"Which berth is reserved for the {ship}?", berth
    )


def _phone(rng: random.Random) -> Needle:
    person, number = rng.choice(_STAFF), _digits(rng)
    line = f"Anyone who needs {person} after hours should dial extension {number}."
    return Needle((line,), f"I need {person} after hours; what extension should I dial?", number)


def _stock(rng: random.Random) -> Needle:
    goods, amount = rng.choice(_GOODS), _digits(rng)
    return Needle((f"{goods}: {amount} crates in stock",), f"How many crates of {goods} are in stock?", amount)


def _weather(rng: random.Random) -> Needle:
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"))
    line = f"It poured from dawn until dusk on {day} and the streets stood under water."
    return Needle((line,), "When did it rain so heavily?", day)


def _job(rng: random.Random) -> Needle:
    name = rng.choice(_STAFF)
    line = f"{name} spent those years mending shoes in a narrow shop by the bridge."
    return Needle((line,), "Who worked as a cobbler?", name)


def _meal(rng: random.Random) -> Needle:
    dish = rng.choice(("lentils", "trout", "dumplings", "cabbage", "venison"))
    line = f"They sat down late that night, and there was nothing left in the pot but {dish}."
    return Needle((line,), "What did the guests have for supper?", dish)


def _many_cargoes(rng: random.Random) -> Needle:
    pairs = rng.sample([(ship, goods) for ship in _SHIPS for goods in _GOODS], 24)
    lines = [f"The {ship} carries {_digits(rng)} bales of {goods}." for ship, goods in pairs]
    ship, goods = pairs[0]
    return Needle(
        (lines[0],), f"How many bales of {goods} does the {ship} carry?", lines[0].split()[3], tuple(lines[1:])
    )


def _many_desks(rng: random.Random) -> Needle:
    pairs = rng.sample([(person, goods) for person in _STAFF for goods in _GOODS], 24)
    lines = [f"{person} / {goods} desk / drawer {_digits(rng)}" for person, goods in pairs]
    person, goods = pairs[0]
    return Needle((lines[0],), f"Which drawer has {person} at the {goods} desk?", lines[0][-4:], tuple(lines[1:]))


def _all_visits(rng: random.Random) -> Needle:
    ship, days = rng.choice(_SHIPS), [_digits(rng) for _ in range(3)]
    lines = tuple(f"The {ship} was inspected under docket {day}." for day in days)
    return Needle(lines, f"Under which dockets was the {ship} inspected?", days[0])


def _links(rng: random.Random) -> Needle:
    names = rng.sample([f"node_{letter}{digit}" for letter in "abcd" for digit in range(10)], 4)
    value = _digits(rng)
    lines = [f"let {names[0]} be {value};"] + [f"let {b} be {a};" for a, b in pairwise(names)]
    return Needle(tuple(lines), f"Find every name that ends up being {value}.", names[-1])


def _trace(rng: random.Random) -> Needle:
    session, seconds = f"s{rng.randrange(10**6):06d}", _digits(rng)

    def line(session: str, state: str) -> str:
        return f"[{rng.randint(10, 23)}:{rng.randint(10, 59)}:31.{_digits(rng)}] session={session} state={state}"

    others = tuple(line(f"s{rng.randrange(10**6):06d}", "open") for _ in range(12))
    evidence = (f"{line(session, 'closed')} after={seconds}ms",)
    return Needle(evidence, f"After how many milliseconds was session={session} closed?", seconds, others)


def _row(rng: random.Random) -> Needle:
    ships = rng.sample(_SHIPS, 6)
    rows = [
        {"vessel": ship, "flag": rng.choice(_STAFF), "tonnage": rng.randint(1000, 9999), "cargo": rng.choice(_GOODS)}
        for ship in ships
    ]
    lines = [json.dumps(row) for row in rows]
    return Needle((lines[0],), f"Give the tonnage of the vessel {ships[0]}.", str(rows[0]["tonnage"]), tuple(lines[1:]))


def _default(rng: random.Random) -> Needle:
    goods, value = rng.choice(_GOODS), _digits(rng)
    line = f"def load_{goods}(path, retries={value}):"
    return Needle(
        (line, f'    """Load {goods} from a path."""'), f"What is the default of retries in load_{goods}?", value
    )


HELD_OUT: dict[str, tuple[Wording, ...]] = {
    "fact": (_berth, _phone, _stock),
    "paraphrase": (_weather, _job, _meal),
    "many facts": (_many_cargoes, _many_desks),
    "values": (_all_visits,),
    "chain": (_links,),
    "log": (_trace,),
    "record": (_row,),
    "code": (_default,),
}
