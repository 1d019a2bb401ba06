"""Documents whose lines and sentences are known because they are put together of them, and a check of what is kept.

Nothing of the package: every document comes with the statements that may stand alone, line by line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = ("Linwick", "Marbury", "Nordine", "St. Paul", "Oslo", "J. R. Voss", "Karmont Inc.", "Mt. Hale")
TITLES = ("Mr.", "Dr.", "Mrs.", "Prof.", "Capt.")


@dataclass(frozen=True)
class Document:
    """lines: of every line, what of it may stand alone, in order, and what each of them may stand behind (a speaker, a
    bullet). end: the line break."""

    text: str
    lines: Sequence[tuple[str, tuple[str, ...]]]


def whole(lines: Sequence[str], end: str) -> Document:
    """A document of which every line is kept or dropped whole."""
    return Document("".join(line + end for line in lines), [("", (line,)) for line in lines])


def false_lines(document: Document, result: str, markers: Sequence[str]) -> list[str]:
    """Lines of a result that are no line of a document, no sentences of one in order, and no marker.

    Blanks at the ends of lines and between sentences do not count.
    """
    known = {_plain(f"{label} {' '.join(parts)}") for label, parts in document.lines}
    return [
        line
        for line in map(_plain, result.splitlines())
        if line and line not in known and line not in map(_plain, markers) and not _is_of_one_line(line, document)
    ]


def _is_of_one_line(line: str, document: Document) -> bool:
    """Whether a line is some sentences of one line, in order, behind its label or none."""
    for label, parts in document.lines:
        rest = line.removeprefix(_plain(label)).strip() if label else line
        for part in map(_plain, parts):
            rest = rest.removeprefix(part).strip()
        if not rest:
            return True
    return False


def _plain(text: str) -> str:
    # The token that holds a line's break may hold the stop before it too, behind another sentence's.
    return re.sub(r"[.?!\u2026\u0964\u06d4\u3002\u061f]+", ".", " ".join(text.split()))


def _sentence(rng: random.Random, at: int) -> str:
    name, number = rng.choice(NAMES), rng.randrange(100, 9999)
    return rng.choice(
        (
            f"The code of {rng.choice(TITLES)} {name} is {number}.",
            f"It cost {number}.50 francs, i.e. {at} per cent of No. {at}.",
            f'"Where is it? I know. It is {number}," {name} said at last.',
            f"See fig. {at} and e.g. Smith et al. for {name} (p. {at}. Not p. 9.) again!",
            f"Did {name} pay {number} at 5 p.m. on Jan. {at % 28 + 1}?",
            f"No, {name} (the {at}th) waited until {at % 12 + 1}.30\u2026",
        )
    )


def prose(rng: random.Random, end: str) -> Document:
    lines = [("", tuple(_sentence(rng, at) for at in range(rng.randrange(1, 5)))) for _ in range(40)]
    return Document("".join(" ".join(parts) + end for _, parts in lines), lines)


def speakers(rng: random.Random, end: str) -> Document:
    labels = ("Grad D:", "Project Manager:", "note:", "-", "3.", "> ")
    lines = [
        (rng.choice(labels).strip(), tuple(_sentence(rng, at) for at in range(rng.randrange(1, 5)))) for _ in range(40)
    ]
    return Document("".join(f"{label} {' '.join(parts)}{end}" for label, parts in lines), lines)


def table(rng: random.Random, end: str) -> Document:
    rows = [f"| {at} | {rng.choice(NAMES)} Near. Nice. | {rng.randrange(9999)} |" for at in range(60)]
    return whole(["| No. | Name | Code |", "|---|---|---|", *rows], end)


def csv(rng: random.Random, end: str) -> Document:
    rows = [f'{at},"{rng.choice(TITLES)} {rng.choice(NAMES)}",{rng.randrange(9999)}' for at in range(60)]
    return whole(["id,name,amount", *rows], end)


def tabs(rng: random.Random, end: str) -> Document:
    return whole([f"{at}\t{rng.choice(NAMES)} Inc. Paid.\t{rng.randrange(9999)}" for at in range(60)], end)


def log(rng: random.Random, end: str) -> Document:
    stamps = ("2025-03-{:02d} 10:{:02d} host", "Mar {} 10:{:02d}:07 host sshd[4]: ", "[{:02d}/Mar 10:{:02d}:11] ")
    stamp = rng.choice(stamps)
    lines = [
        f"{stamp.format(at % 28 + 1, at % 60)}{at} Connection to {rng.choice(NAMES)} lost. Retry in {at} s. No. {at}"
        for at in range(60)
    ]
    return whole(lines, end)


def grep(rng: random.Random, end: str) -> Document:
    return whole([f"src/file_{at % 7}.py:{at}:    # Set {rng.choice(NAMES)}. Then go on." for at in range(60)], end)


def numbered(rng: random.Random, end: str) -> Document:
    lines = [(f"{at:6d}\t", (f"It is {rng.choice(NAMES)}.", f"He paid {rng.randrange(999)}.")) for at in range(60)]
    return Document("".join(f"{number}{' '.join(parts)}{end}" for number, parts in lines), lines)


def json_lines(rng: random.Random, end: str) -> Document:
    records = [{"id": at, "note": f"Saw {rng.choice(NAMES)}. Left.", "sum": rng.randrange(9999)} for at in range(50)]
    return whole([json.dumps(record) for record in records], end)


def pretty_json(rng: random.Random, end: str) -> Document:
    records = [{"id": at, "note": f"Saw {rng.choice(NAMES)}. Left.", "sum": rng.randrange(9999)} for at in range(30)]
    return whole(json.dumps({"items": records}, indent=rng.choice((1, 2, 4))).split("\n"), end)


def yaml(rng: random.Random, end: str) -> Document:
    lines = ["servers:"]
    for at in range(40):
        lines += [
            f"  - name: host{at}",
            f"    note: Near {rng.choice(NAMES)}. Fine.",
            f"    port: {rng.randrange(9999)}",
        ]
    return whole(lines, end)


def diff(rng: random.Random, end: str) -> Document:
    lines = []
    for file in range(6):
        lines += [f"diff --git a/f{file}.c b/f{file}.c", f"--- a/f{file}.c", f"+++ b/f{file}.c"]
        for at in range(3):
            lines += [f"@@ -{at * 9 + 1},3 +{at * 9 + 1},3 @@ f{at}()", " int x; // One. Two."]
            lines += [f"-    y = {rng.randrange(99)}; // Old. Bad.", f"+    y = {rng.randrange(99)}; // New. Good."]
    return whole(lines, end)


def code(rng: random.Random, end: str) -> Document:
    """Comments of two sentences over statements, in six languages."""
    sign, statement = rng.choice(
        (
            ("#", "    set_valve({at}, {value})"),
            ("//", "launch({at}, {value});"),
            ("//", "\tfmt.Println({at}, {value})"),
            ("--", "UPDATE t SET a = {at} WHERE b = {value};"),
            ("///", "    let x{at} = call({value});"),
            ("/*", "x[{at}] = {value}; /* One. Two. */"),
        )
    )
    lines = []
    for at in range(60):
        closing = " */" if sign == "/*" else ""
        lines += [f"{sign} Step {at}. Needs {rng.choice(NAMES)}. Careful!{closing}"]
        lines += [statement.format(at=at, value=rng.randrange(9999))]
    return whole(lines, end)


def scripts(rng: random.Random, end: str) -> Document:
    """Sentences on one line each paragraph, in five scripts."""
    unit, joint = rng.choice(
        (
            ("कमरा संख्या {at} का कोड {value} है और दरवाज़ा बंद रहता है।", " "),
            ("کمرہ نمبر {at} کا کوڈ {value} ہے اور یہ بند رہتا ہے۔", " "),
            ("部屋{at}の暗証番号は{value}であり、扉は閉まっている。", ""),
            ("Код комнаты {at} равен {value}, т. е. дверь закрыта.", " "),
            ("رمز الغرفة {at} هو {value}، فهل الباب مغلق؟", " "),
        )
    )
    lines = []
    for row in range(12):
        parts = tuple(unit.format(at=row * 9 + at, value=rng.randrange(100, 9999)) for at in range(6))
        lines.append(("", parts))
    return Document("".join(joint.join(parts) + end for _, parts in lines), lines)


KINDS: dict[str, Callable[[random.Random, str], Document]] = {
    make.__name__: make
    for make in (
        *(prose, speakers, scripts, table, csv, tabs, log, grep, numbered),
        *(json_lines, pretty_json, yaml, diff, code),
    )
}
