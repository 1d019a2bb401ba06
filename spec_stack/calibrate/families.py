"""Families of needles, each hidden in fitting text: `make_prompt_text(family, number, seed, texts)`, deterministic. One
family's prompts need similar evidence, so heads are judged on families that did not select them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spec_stack.calibrate.needles import WORDINGS, Haystack, Needle, Wording, hide

_PEOPLE = ("Agnes", "Bruno", "Carmen", "Dmitri", "Elif", "Farid", "Gwen", "Hiro", "Isolde", "Jonas", "Kiran", "Livia")
_HOSTS = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "rowan")
_PORTS = ("Antwerp", "Bilbao", "Cork", "Durban", "Esbjerg", "Genoa", "Halifax", "Izmir")


def _several_fees(rng: random.Random) -> Needle:
    people, month = rng.sample(_PEOPLE, 4), rng.choice(("March", "June", "October"))
    lines = [f"In {month} {person} was fined {rng.randint(11, 98)} florins by the guild." for person in people]
    question = f"Add up the fines that {people[0]}, {people[1]} and {people[2]} got in {month}."
    return Needle(tuple(lines[:3]), question, lines[0].split()[5], (lines[3],))


def _several_ships(rng: random.Random) -> Needle:
    ports = rng.sample(_PORTS, 3)
    lines = [f"{rng.randint(3, 19)} grain ships lay at anchor off {port} that week." for port in ports]
    question = f"How many grain ships lay off {ports[0]}, and how many off {ports[1]} and {ports[2]}?"
    return Needle(tuple(lines), question, lines[0].split()[0])


def _chain_bank(rng: random.Random) -> Needle:
    person, other, port = *rng.sample(_PEOPLE, 2), rng.choice(_PORTS)
    firm, bank = rng.choice(("Osprey", "Marigold", "Keystone")), rng.choice(("Alpine", "Mercer", "Union"))
    lines = (
        f"{person} has worked for the firm {firm} since spring.",
        f"Wages of the firm {firm} come from the {bank} bank.",
        f"The {bank} bank has its only branch in {port}.",
    )
    question = f"In which city is the branch that the wages of {person} come from?"
    return Needle(lines, question, port, (f"{other} has worked for nobody yet.",))


def _log_status(rng: random.Random) -> Needle:
    job, code = f"job-{rng.randrange(16**5):05x}", rng.randint(2, 240)
    line = _log_line(rng, rng.randrange(900), f"cron[{rng.randint(100, 999)}]: {job} aborted, exit status {code}")
    return Needle((line,), f"What was the exit status of {job}?", str(code))


def _log_size(rng: random.Random) -> Needle:
    table, size = f"tbl_{rng.randrange(16**4):04x}", rng.randint(1200, 99000)
    text = f"vacuum[{rng.randint(100, 999)}]: {table} shrank by {size} pages"
    return Needle((_log_line(rng, rng.randrange(900), text),), f"By how many pages did {table} shrink?", str(size))


def _log_in_other_words(line: str, question: str) -> Wording:
    def make(rng: random.Random) -> Needle:
        return Needle((_log_line(rng, rng.randrange(900), line.format(rng.randint(2, 240))),), question, "")

    return make


def _json_area(rng: random.Random) -> Needle:
    record = _record(rng)
    return Needle((json.dumps(record),), f"How much fuel did the flight {record['flight']} take?", str(record["fuel"]))


def _json_pilot(rng: random.Random) -> Needle:
    record = _record(rng)
    return Needle((json.dumps(record),), f"Name the pilot of flight {record['flight']}.", str(record["pilot"]))


def _function(code: str, does: str, name: str) -> Wording:
    def make(rng: random.Random) -> Needle:
        asked = rng.choice(("What is the function called that {}?", "Name the function which {}."))
        return Needle((code,), asked.format(does), name)

    return make


def _dialogue_sum(rng: random.Random) -> Needle:
    person, room, price = rng.choice(_PEOPLE), rng.choice(("attic", "lobby", "canteen")), rng.randint(300, 9000)
    line = f"{person}: The painter wants {price} for the {room}, and he can start on the {rng.randint(2, 28)}th."
    return Needle((line,), f"How much does the painter want for the {room}?", str(price))


def _dialogue_said(rng: random.Random) -> Needle:
    person, tool = rng.choice(_PEOPLE), rng.choice(("scanner", "projector", "label printer"))
    line = f"{person}: I ordered the new {tool} from {rng.choice(_PORTS)}, order number {rng.randint(10000, 99999)}."
    return Needle((line,), f"What is the order number of the {tool}, and who ordered it?", line[-6:-1])


def _said_in_other_words(text: str, question: str) -> Wording:
    def make(rng: random.Random) -> Needle:
        person = rng.choice(_PEOPLE)
        return Needle((f"{person}: {text}",), question, person)

    return make


@dataclass(frozen=True)
class Family:
    """Needles of one kind. medium: the surrounding text. in_other_words: question and evidence share no keyword."""

    medium: str
    wordings: tuple[Wording, ...]
    in_other_words: bool = False


FAMILIES: Mapping[str, Family] = {
    "fact": Family("text", (*WORDINGS["fact"], *WORDINGS["many facts"])),
    "paraphrase": Family("text", WORDINGS["paraphrase"], True),
    "several facts": Family("text", (_several_fees, _several_ships, *WORDINGS["values"])),
    "chain": Family("text", (_chain_bank, *WORDINGS["chain"])),
    "log": Family("log", (_log_status, _log_size)),
    "log, other words": Family(
        "log",
        (
            _log_in_other_words("kernel: eth{0} carrier lost", "Where was a network cable pulled out?"),
            _log_in_other_words("bmc[{0}]: fan 2 at 0 rpm, 91 C", "Which line tells that something ran too hot?"),
            _log_in_other_words("chronyd[{0}]: offset -94.1 s, stepping", "When was a clock found to be wrong?"),
            _log_in_other_words("upsd[{0}]: on battery, 4 min left", "At what time was there a blackout?"),
            _log_in_other_words("scrub[{0}]: sha256 differs in extent 8812", "Where was damaged data found?"),
            _log_in_other_words("lb[{0}]: 429 sent to 198.51.100.7", "When was somebody told to ask less often?"),
        ),
        True,
    ),
    "json": Family("json", (_json_area, _json_pilot)),
    "constant": Family("code", WORDINGS["code"]),
    "function": Family(
        "code",
        (
            _function(
                "def fold(words):\n    seen = {}\n    for word in words:\n        seen[word] = seen.get(word, 0) + 1\n"
                "    return seen",
                "counts how often every item occurs",
                "fold",
            ),
            _function(
                "def spin(rows):\n    return [list(row) for row in zip(*rows[::-1])]",
                "turns a grid by ninety degrees",
                "spin",
            ),
            _function(
                "def leap(y):\n    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
                "says in which years February is longer",
                "leap",
            ),
            _function(
                "def mirror(s):\n    kept = [c for c in s.lower() if c.isalpha()]\n    return kept == kept[::-1]",
                "recognises palindromes",
                "mirror",
            ),
            _function(
                "def tame(x, low, high):\n    if x < low:\n        return low\n    return high if x > high else x",
                "keeps a number within bounds",
                "tame",
            ),
            _function(
                "def common(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
                "finds the greatest divisor of two numbers",
                "common",
            ),
            _function(
                "def weave(a, b):\n    out = []\n    while a and b:\n"
                "        out.append((a if a[0] <= b[0] else b).pop(0))\n    return out + a + b",
                "merges two lists that are in order",
                "weave",
            ),
            _function(
                "def veil(text, n):\n    out = ''\n    for c in text:\n"
                "        out += chr((ord(c) - 97 + n) % 26 + 97)\n    return out",
                "encrypts by shifting letters through the alphabet",
                "veil",
            ),
        ),
        True,
    ),
    "dialogue": Family("dialogue", (_dialogue_sum, _dialogue_said)),
    "dialogue, other words": Family(
        "dialogue",
        (
            _said_in_other_words(
                "My daughter is due in two weeks, so I may vanish.", "Who is about to be a grandparent?"
            ),
            _said_in_other_words("I could not follow a word, the line kept cutting out.", "Who had a bad connection?"),
            _said_in_other_words("Nuts make my throat swell shut, so none of that cake.", "Who has an allergy?"),
            _said_in_other_words("They offered me Berlin, and I said yes last night.", "Who is going to move away?"),
            _said_in_other_words("I keep nodding off, the baby was up till four.", "Who has hardly slept?"),
            _said_in_other_words("We would all be home by now if somebody had read the plan.", "Who is annoyed?"),
        ),
        True,
    ),
}


def make_prompt_text(kind: str, number: int, seed: int, texts: Mapping[str, Sequence[str]], size: int) -> Haystack:
    """A document with a needle of a family, and its question.

    kind: a name of `FAMILIES`. number: cycles through the wordings. texts: documents for the media "text" and "code";
    other media are generated. size: characters without the needle, about.
    """
    rng = random.Random(f"{seed}/{kind}/{number}/{size}")
    family = FAMILIES[kind]
    needle = family.wordings[number % len(family.wordings)](rng)
    made = _MADE.get(family.medium)
    lines = _lines_of(texts[family.medium], size, rng) if made is None else _take(made(rng), size)
    return hide(kind, needle, lines, rng)


def _take(lines: Iterator[str], size: int) -> list[str]:
    taken: list[str] = []
    while size > 0:
        taken.append(next(lines))
        size -= len(taken[-1]) + 1
    return taken


def _lines_of(texts: Sequence[str], size: int, rng: random.Random) -> list[str]:
    """Lines of about `size` characters, from a random line of a random text on, wrapping around at its end."""
    lines = rng.choice([text for text in texts if text.strip()]).split("\n")
    at = rng.randrange(len(lines))
    return _take((line for _ in iter(int, 1) for line in lines[at:] + lines[:at]), size)


def _log_line(rng: random.Random, minute: int, text: str) -> str:
    clock = f"{6 + minute // 60:02d}:{minute % 60:02d}:{rng.randrange(60):02d}"
    return f"Sep {rng.randint(3, 9):2d} {clock} {rng.choice(_HOSTS)}-{rng.randint(1, 6)} {text}"


def _log(rng: random.Random) -> Iterator[str]:
    for step in iter(range(10**9)):
        number = rng.randint(100, 999)
        text = rng.choice(
            (
                f"nginx[{number}]: GET /v2/items/{rng.randrange(9999)} 200 {rng.randint(2, 900)} ms",
                f"sshd[{number}]: session opened for user deploy",
                f"cron[{number}]: job-{rng.randrange(16**5):05x} finished in {rng.randint(1, 90)} s",
                f"vacuum[{number}]: tbl_{rng.randrange(16**4):04x} scanned, {rng.randrange(9000)} rows",
                f"queue[{number}]: {rng.randint(1, 60)} messages acknowledged, lag {rng.random():.3f} s",
                f"dhcpd[{number}]: lease 10.{rng.randrange(255)}.{rng.randrange(255)}.7 renewed",
            )
        )
        yield _log_line(rng, step // 2 % 900, text)


def _record(rng: random.Random) -> dict[str, object]:
    return {
        "flight": f"{rng.choice('BKQTX')}{rng.choice('AEL')}{rng.randint(100, 9999)}",
        "pilot": f"{rng.choice(_PEOPLE)} {rng.choice('ABCDEFGHJ')}.",
        "legs": [{"to": rng.choice(_PORTS), "minutes": rng.randint(35, 480)} for _ in range(rng.randint(1, 3))],
        "fuel": round(rng.uniform(2, 60), 2),
        "late": rng.random() < 0.3,
    }


def _records(rng: random.Random) -> Iterator[str]:
    while True:
        yield json.dumps(_record(rng))


def _chat(rng: random.Random) -> Iterator[str]:
    people = rng.sample(_PEOPLE, 5)
    things = ("the budget", "the second draft", "our website", "the survey", "that prototype", "the hiring plan")
    while True:
        thing, other = rng.sample(things, 2)
        text = rng.choice(
            (
                f"I would leave {thing} until we know more about {other}.",
                f"Can we come back to {thing}? Um, I am not sure that everybody has seen it.",
                f"Right, so {thing} is nearly done, and I will send it round on {rng.choice(('Monday', 'Friday'))}.",
                "Okay.",
                f"Yeah, I agree, and {other} depends on that as well, does it not?",
                f"We have {rng.randint(2, 40)} comments on {thing}, most of them small ones.",
                f"Last time we said that {thing} goes first, then {other}, and nobody has changed that since.",
                "Mm-hmm. Go on.",
            )
        )
        yield f"{rng.choice(people)}: {text}"


_MADE: Mapping[str, Callable[[random.Random], Iterator[str]]] = {"log": _log, "json": _records, "dialogue": _chat}
