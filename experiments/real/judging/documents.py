"""Documents of known length in which lines are hidden, and what is asked about these.

Wordings: experiments/prompts/requests.json and evidence.json. Texts: `python -m experiments.real.fetch_texts`; logs,
JSON, YAML and CSV are generated.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.real.evidence_prompts import PEOPLE, SERVICES, THINGS, TOWNS, Measure, between_blocks, ordinary_text

WORDS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "prompts" / "requests.json").read_text("utf-8"))
LANGUAGES = ("german", "chinese", "japanese", "arabic")
_CODE = ("python", "rust", "javascript")
_PARTS = ("mesh", "gate", "store", "queue", "relay", "vault", "index", "proxy", "cron", "media")


@dataclass(frozen=True)
class Needle:
    """Lines that stand together, like lines about something else, the evidence among them, and what asks for it."""

    lines: tuple[str, ...]
    others: tuple[str, ...]
    evidence: tuple[str, ...]
    asks: Mapping[str, str]


@dataclass(frozen=True)
class Document:
    source: str
    text: str
    needles: tuple[Needle, ...]


class Texts:
    """The fetched texts, by medium, in an order of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._by_medium: dict[str, list[tuple[str, str]]] = {}
        with (folder / "texts.jsonl").open(encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                self._by_medium.setdefault(record["medium"], []).append((record["source"], record["text"]))
        for medium, texts in self._by_medium.items():
            random.Random(f"{seed}/{medium}").shuffle(texts)

    def get(self, medium: str, number: int) -> tuple[str, str]:
        """Source and text of one number, always the same; no text serves two numbers while there are others."""
        texts = self._by_medium[medium]
        return texts[number % len(texts)]


def make_document(
    texts: Texts, medium: str, number: int, num_tokens: int, measure: Measure, num_needles: int = 2
) -> Document:
    """A document of about num_tokens with hidden lines, always the same of one number."""
    rng = random.Random(f"{medium}/{number}/{num_tokens}")
    if medium == "several documents":
        return _several(texts, rng, number, num_tokens, measure)
    source, lines = haystack(texts, medium, number, num_tokens, measure, rng)
    needles = draw(rng, medium, lines, num_needles)
    return Document(source, "\n".join(hide(rng, lines, needles, medium)), needles)


def haystack(
    texts: Texts, medium: str, number: int, num_tokens: int, measure: Measure, rng: random.Random
) -> tuple[str, list[str]]:
    """Where a text is from, and about num_tokens of its lines."""
    source, following = f"{medium} {number}", _generated(rng, medium)
    if following is None:
        source, text = texts.get("english" if medium == "manual" else medium, number)
        text_lines = text.split("\n")
        # The beginning of code is its imports; prose may begin anywhere.
        begin = 0 if medium in (*_CODE, "diff") else rng.randrange(max(1, len(text_lines) // 3))
        following = iter(text_lines[begin:])
    lines: list[str] = []
    total = 0
    for line in following:
        total += measure(line + "\n")
        if total > num_tokens:
            break
        if medium == "manual" and len(lines) % 9 == 0:
            lines.append(f"\n## {rng.choice(TOWNS)}, part {len(lines)}\n")
        lines.append(line)
    return source, lines


def hide(rng: random.Random, lines: Sequence[str], needles: Sequence[Needle], medium: str) -> list[str]:
    """The lines with the needles' between them; records are there already."""
    parts = list(lines)
    for block in [text for needle in needles for text in (needle.lines, *((other,) for other in needle.others))]:
        if block and block[0] not in parts:
            at = rng.randrange(len(parts) // 12, max(len(parts) * 9 // 10, len(parts) // 12 + 1))
            at = between_blocks(parts, at, ")]}#/*@") if medium in _CODE else at
            parts[at:at] = block
    return parts


def draw(rng: random.Random, medium: str, lines: Sequence[str], number: int) -> tuple[Needle, ...]:
    """Needles for a document, no two of one wording where there are several."""
    if medium in ("json", "yaml", "csv"):
        return tuple(_of_record(rng, medium, block) for block in rng.sample(_records(lines, medium), number))
    wordings = WORDS["needles"][medium]
    first = rng.randrange(len(wordings))
    lists = (WORDS["people"].get(medium, PEOPLE), TOWNS, WORDS["constants"])
    mixed = [rng.sample(each, len(each)) for each in lists]
    own = [
        [_names(rng, *(each[at % len(each)] for each in mixed)) for at in range(3 * turn, 3 * turn + 3)]
        for turn in range(number)
    ]
    return tuple(_fill(rng, medium, wordings[(first + at) % len(wordings)], own[at]) for at in range(number))


def _fill(rng: random.Random, medium: str, wording: Mapping[str, Any], names: Sequence[Mapping[str, str]]) -> Needle:
    """A wording with the first of these names, and with the others beside it."""
    asks = {kind: fill(text, names[0]) for kind, text in wording.items() if isinstance(text, str)}
    minute = rng.randrange(900)

    def block(own: Mapping[str, str]) -> tuple[str, ...]:
        texts = [fill(wording[part], own) for part in ("heading", "line", "second") if part in wording]
        return tuple(_log_line(rng, minute, "ERROR", text) for text in texts) if medium == "log" else tuple(texts)

    found = block(names[0])
    others = () if wording.get("alone") else tuple("\n".join(block(each)) for each in names[1:])
    return Needle(found, others, found, asks)


def fill(text: str, names: Mapping[str, str]) -> str:
    """A wording with these names; other braces are its own."""
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), text)


def _names(rng: random.Random, who: str, town: str, constant: str) -> dict[str, str]:
    """What a wording's names stand for."""
    head, *rest = constant.lower().split("_")
    numbers = {name: str(rng.randrange(low, high)) for name, low, high in _NUMBERS}
    return numbers | {
        "who": who,
        "thing": rng.choice(THINGS),
        "town": town,
        "NAME": constant,
        "camel": head + "".join(part.title() for part in rest),
        "job": f"{rng.choice(_PARTS)}-{rng.randrange(1000, 9999)}",
    }


_NUMBERS = (("n", 112, 9889), ("m", 112, 9889), ("k", 3, 70), ("j", 200, 900))


def _generated(rng: random.Random, medium: str) -> Iterator[str] | None:
    """The lines of a generated medium without end; None for others."""
    if medium == "log":
        return (_ordinary(rng, step // 3) for step in range(10**6))
    if medium == "json":
        return (_order(rng, number) for number in range(10**6))
    if medium == "yaml":
        names = rng.sample([f"{one}-{other}" for one in _PARTS for other in _PARTS if one != other], 90)
        return (line for name in names for line in _service(rng, name))
    if medium == "csv":
        return (_row(rng, number) for number in range(10**6))
    return None


def _log_line(rng: random.Random, minute: int, level: str, text: str) -> str:
    stamp = f"2026-03-11T{minute // 60 % 24:02d}:{minute % 60:02d}:{rng.randrange(60):02d}"
    return f"{stamp}Z {level:5} [{rng.choice(SERVICES)}-{rng.randrange(10)}] {text}"


def _ordinary(rng: random.Random, minute: int) -> str:
    text = ordinary_text(rng)
    return _log_line(rng, minute, rng.choice(("INFO", "INFO", "DEBUG")), f"{text} pod={rng.getrandbits(32):08x}")


def _order(rng: random.Random, number: int) -> str:
    record = {
        "id": f"ord-{number:03d}{rng.randrange(1000):03d}",
        "customer": rng.choice(PEOPLE),
        "city": rng.choice(TOWNS),
        "total": round(rng.uniform(5, 900), 2),
        "paid": rng.random() < 0.7,
    }
    return json.dumps(record)


def _service(rng: random.Random, name: str) -> list[str]:
    return [
        f"{name}:",
        f"  image: registry/{name.split('-')[0]}:{rng.randrange(1, 9)}.{rng.randrange(30)}",
        f"  memory: {rng.randrange(2, 60) * 32}Mi",
        f"  port: {rng.randrange(3000, 9900)}",
        f"  debug: {rng.choice(('true', 'false'))}",
    ]


def _row(rng: random.Random, number: int) -> str:
    if not number:
        return "day,town,article,pieces,price"
    article = f"{rng.choice('KLMNP')}{number:03d}-{rng.randrange(10, 99)}"
    return (
        f"2026-03-{number % 28 + 1:02d},{rng.choice(TOWNS)},{article},{rng.randrange(3, 400)},{rng.uniform(1, 90):.2f}"
    )


def _records(lines: Sequence[str], medium: str) -> list[list[str]]:
    """The records between a generated document's lines, without the ends."""
    if medium == "yaml":
        starts = [at for at, line in enumerate(lines) if line.endswith(":") and at + 5 < len(lines)][2:-2]
        return [list(lines[at : at + 5]) for at in starts if lines.count(lines[at + 3]) == 1]
    return [[line] for line in lines[5:-5]]


def _of_record(rng: random.Random, medium: str, block: list[str]) -> Needle:
    """The question about a record."""
    evidence: tuple[str, ...]
    if medium == "json":
        names, evidence = {"id": json.loads(block[0])["id"]}, (block[0],)
    elif medium == "csv":
        names, evidence = {"id": block[0].split(",")[2]}, (block[0],)
    else:
        # The name, and the value that lines separate from it.
        names, evidence = {"name": block[0][:-1]}, (f"{block[0]}\n", block[3])
    asks = {kind: fill(text, names) for kind, text in rng.choice(WORDS["needles"][medium]).items()}
    return Needle(tuple(block), (), evidence, asks)


def _several(texts: Texts, rng: random.Random, number: int, num_tokens: int, measure: Measure) -> Document:
    """Six parts of different documents, two of which hide a line."""
    parts: list[str] = []
    needles: list[Needle] = []
    for at, medium in enumerate(("english", "python", "log", "english", "german", "manual")):
        # Of texts that no document of one medium takes.
        name, lines = haystack(texts, medium, 60 + 6 * number + at, num_tokens // 6, measure, rng)
        if medium == "english":
            own = draw(rng, medium, lines, 1)
            lines, needles = hide(rng, lines, own, medium), [*needles, *own]
        parts.append(f"[Document {at + 1}: {name}]\n" + "\n".join(lines))
    return Document(f"several documents {number}", "\n\n".join(parts), tuple(needles))
