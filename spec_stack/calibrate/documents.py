"""Long texts that needles are hidden in: standard-library source code and manuals, generated logs, records and talk."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle, islice
from pathlib import Path

MODULES = (
    "argparse",
    "tarfile",
    "typing",
    "inspect",
    "zipfile",
    "subprocess",
    "doctest",
    "turtle",
    "pickletools",
    "ast",
)
PEOPLE = (
    *("Agnes", "Bruno", "Carmen", "Dmitri", "Elif", "Farid", "Gwen", "Hiro", "Isolde", "Jonas", "Kiran", "Livia"),
    *("Tomas", "Ingrid", "Rahul", "Beatrix", "Owen", "Leila", "Sven", "Amara", "Colin", "Yuki", "Petra", "Dario"),
)
PORTS = ("Antwerp", "Bilbao", "Cork", "Durban", "Esbjerg", "Genoa", "Halifax", "Izmir")
_HOSTS = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "rowan")


def module_source(module: str) -> str:
    """A standard-library module's source, without importing it. Raises ValueError if it has none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ValueError(f"this Python has no source for the module {module!r}")
    return Path(spec.origin).read_text(encoding="utf-8")


def default_documents() -> dict[str, list[str]]:
    """Standard-library texts: source "code", and English manuals as "text"."""
    from pydoc_data.topics import topics

    sources, manual = [module_source(module) for module in MODULES], "\n\n".join(topics.values())
    size = len(manual) // len(sources)
    return {"code": sources, "text": [manual[at * size : (at + 1) * size] for at in range(len(sources))]}


def lines_of(medium: str, texts: Mapping[str, Sequence[str]], size: int, rng: random.Random) -> list[str]:
    """Lines of about `size` characters: generated, or of one of the medium's texts."""
    return of_size(_GENERATED[medium](rng) if medium in _GENERATED else _from_a_line(texts[medium], rng), size)


def of_size(lines: Iterator[str], size: int) -> list[str]:
    """The first lines, of about `size` characters."""
    taken: list[str] = []
    while size > 0:
        taken.append(next(lines))
        size -= len(taken[-1]) + 1
    return taken


def _from_a_line(texts: Sequence[str], rng: random.Random) -> Iterator[str]:
    """A random text from a random line on, wrapping around at its end."""
    lines = rng.choice([text for text in texts if text.strip()]).split("\n")
    return islice(cycle(lines), rng.randrange(len(lines)), None)


def log_stamp(rng: random.Random, minute: int) -> str:
    clock = f"{6 + minute // 60:02d}:{minute % 60:02d}:{rng.randrange(60):02d}"
    return f"Sep {rng.randint(3, 9):2d} {clock} {rng.choice(_HOSTS)}-{rng.randint(1, 6)}"


def _log(rng: random.Random) -> Iterator[str]:
    for step in count():
        number = rng.randint(100, 999)
        text = rng.choice(
            (
                f"nginx[{number}]: GET /v2/items/{rng.randrange(9999)} 200 {rng.randint(2, 900)} ms",
                f"sshd[{number}]: session opened for user deploy",
                f"cron[{number}]: job-{rng.randrange(16**5):05x} finished in {rng.randint(1, 90)} s",
                f"vacuum[{number}]: tbl_{rng.randrange(16**5):05x} scanned, {rng.randrange(9000)} rows",
                f"queue[{number}]: {rng.randint(1, 60)} messages acknowledged, lag {rng.random():.3f} s",
                f"dhcpd[{number}]: lease 10.{rng.randrange(255)}.{rng.randrange(255)}.7 renewed",
            )
        )
        yield f"{log_stamp(rng, step // 2 % 900)} {text}"


def flight_record(rng: random.Random) -> dict[str, object]:
    return {
        "flight": f"{rng.choice('BKQTX')}{rng.choice('AEL')}{rng.randint(100, 9999)}",
        "pilot": f"{rng.choice(PEOPLE)} {rng.choice('ABCDEFGHJ')}.",
        "legs": [{"to": rng.choice(PORTS), "minutes": rng.randint(35, 480)} for _ in range(rng.randint(1, 3))],
        "fuel": round(rng.uniform(2, 60), 2),
        "late": rng.random() < 0.3,
    }


def _dialogue(rng: random.Random) -> Iterator[str]:
    people = rng.sample(PEOPLE, 5)
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


_GENERATED: Mapping[str, Callable[[random.Random], Iterator[str]]] = {
    "log": _log,
    "json": lambda rng: (json.dumps(flight_record(rng)) for _ in count()),
    "dialogue": _dialogue,
}
