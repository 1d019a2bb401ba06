"""Prompts of known length that hide what their question asks for, with the characters where that stands.

`make_prompts`: one question behind each document. `shaped_prompts`: documents with several questions, each asked in
many shapes of prompts (`SHAPES`). `multi_hop`: question sets whose evidence stands in several paragraphs.

Eleven kinds, with and without words in common with the question, in novels, Python modules, meetings, logs and JSON
records. The wordings (experiments/prompts/evidence.json) have chosen nothing. The texts come from a folder: one of
`experiments.real.fetch_texts`, where manuals stand for novels and meetings, or, as for evidence_novels_2k.json, one of
novels out of copyright (ELTeC-eng, 100_english_novels), Python modules and QMSum: `corpus/prose_novels_*.jsonl.xz`,
`corpus/code_python_*.jsonl.xz` (records with "id" and "text") and `qmsum/val.jsonl`.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

Measure = Callable[[str], int]
Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class EvidencePrompt:
    """A document, a question about it, and half-open character spans of the document, all of which the answer needs.

    source: what intervals are drawn over; prompts of one source share their document's origin.
    answers: what a right answer holds, all of it, in whatever case; empty where only the evidence is known.
    shape: how the question is asked, a name of `SHAPES`.
    other: a second question of the document, for shapes that ask two.
    hops: for every step of a chain, the spans of its answer, one of which it needs.
    """

    name: str
    kind: str
    source: str
    document: str
    question: str
    spans: tuple[tuple[int, int], ...]
    answers: tuple[str, ...] = ()
    shape: str = "bare"
    other: str = ""
    hops: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def messages(self) -> Messages:
        """What is sent: roles and texts."""
        parts = {"document": self.document, "question": self.question, "other": self.other}
        return tuple((role, text.format(**parts)) for role, text in SHAPES[self.shape])


@dataclass(frozen=True)
class Hidden:
    """Lines to hide, of which the evidence is `wanted`, the question, and what its answer holds."""

    wanted: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


_WORDS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "prompts" / "evidence.json").read_text("utf-8"))
PEOPLE, TOWNS, THINGS, COLOURS, SERVICES = (
    _WORDS[name] for name in ("people", "towns", "things", "colours", "services")
)


def _fact(rng: random.Random) -> Hidden:
    who, other, third = rng.sample(PEOPLE, 3)
    thing, (one, two, three) = rng.choice(THINGS), rng.sample(range(112, 989), 3)
    line = "The locker in which {} left the {} bears the number {}."
    question = rng.choice(
        [
            f"What number does the locker bear in which {who} left the {thing}?",
            f"{who} left the {thing} in a locker. Which number is on it?",
        ]
    )
    others = line.format(other, thing, two), line.format(third, thing, three)
    return Hidden((line.format(who, thing, one),), others, question, (str(one),))


def _paraphrase(rng: random.Random) -> Hidden:
    who = rng.choice(PEOPLE).split()[0]
    line, question = rng.choice(_WORDS["paraphrase"])
    return Hidden((line.format(who=who),), (), question, (who,))


def _several(rng: random.Random) -> Hidden:
    towns = rng.sample(TOWNS, 4)
    crates = rng.sample(range(14, 97), 4)
    line = "The depot at {} reported {} crates of oranges spoiled."
    wanted = tuple(line.format(town, number) for town, number in zip(towns[:3], crates[:3], strict=True))
    question = (
        f"How many crates of oranges were reported spoiled at {towns[0]}, at {towns[1]} and at {towns[2]}, in all?"
    )
    other = f"The depot at {towns[3]} reported {crates[3]} crates of lemons sound."
    return Hidden(wanted, (other,), question, (str(sum(crates[:3])),))


def _chain(rng: random.Random) -> Hidden:
    one, other = rng.sample(PEOPLE, 2)
    thing, town, elsewhere = rng.choice(THINGS), *rng.sample(TOWNS, 2)
    colour = rng.choice(COLOURS)
    wanted = (
        f"The {thing} was bequeathed to {one}.",
        f"{one} keeps whatever is inherited in the {colour} house.",
        f"The {colour} house stands at the far end of {town}.",
    )
    question = f"In which town is the {thing} now kept?"
    return Hidden(wanted, (f"{other} bought a house in {elsewhere}.",), question, (town,))


def _dialogue(rng: random.Random) -> Hidden:
    who, day = rng.choice(("Marketing", "Professor B", "Grad D", "PhD A")), rng.choice(("Monday", "Thursday", "Friday"))
    cost = rng.randrange(1200, 9800, 50)
    line = f"{who}: And the invoice for the turntable calibration came to {cost} euros , due next {day} ."
    question = "What was the amount of the invoice for the turntable calibration, and when is it due?"
    return Hidden((line,), (), question, (str(cost), day))


def _dialogue_other(rng: random.Random) -> Hidden:
    who = rng.choice(("Grad F", "PhD C", "Project Manager", "Postdoc E"))
    line, question = rng.choice(_WORDS["dialogue_other"])
    return Hidden((f"{who}: {line}",), (), question, (who,))


def _function(rng: random.Random) -> Hidden:
    code, question = rng.choice(_WORDS["function"])
    name = code.removeprefix("def ").partition("(")[0]
    return Hidden((code,), (), f"Which function in the code above {question}? Give its name.", (name,))


def _constant(rng: random.Random) -> Hidden:
    name = rng.choice(("RETRY_WINDOW_MS", "SHARD_FANOUT", "MAX_LEASE_SECONDS", "SPOOL_WATERMARK"))
    value = rng.randrange(130, 9700)
    return Hidden((f"{name} = {value}",), (), f"To which value is {name} set in this module?", (str(value),))


def _log_line(rng: random.Random, minute: int, level: str, text: str) -> str:
    stamp = f"2026-03-{11 + minute // 1440:02d}T{minute // 60 % 24:02d}:{minute % 60:02d}:{rng.randrange(60):02d}"
    return f"{stamp}.{rng.randrange(1000):03d}Z {level:5} [{rng.choice(_WORDS['services'])}-{rng.randrange(10)}] {text}"


def ordinary_text(rng: random.Random) -> str:
    """What a log says when nothing is the matter."""
    text: str = rng.choice(_WORDS["ordinary"])
    while "{}" in text:
        text = text.replace("{}", str(rng.randrange(3, 90000)), 1)
    return text


def _ordinary(rng: random.Random, minute: int) -> str:
    text = ordinary_text(rng)
    return _log_line(
        rng, minute, rng.choice(("INFO", "INFO", "INFO", "DEBUG")), f"{text} pod={rng.getrandbits(32):08x}"
    )


def _log(rng: random.Random) -> Hidden:
    volume, code = rng.randrange(20, 80), rng.randrange(1000, 9999)
    text = f"volume vol-{volume} rejected the snapshot with code E{code} after {rng.randrange(3, 40)} attempts"
    question = f"With which code did volume vol-{volume} reject the snapshot?"
    return Hidden((_log_line(rng, rng.randrange(2000), "WARN", text),), (), question, (f"E{code}",))


def _log_other(rng: random.Random) -> Hidden:
    text, question = rng.choice(_WORDS["log_other"])
    line = _log_line(rng, rng.randrange(2000), "ERROR", text.format(rng.randrange(1, 250)))
    return Hidden((line,), (), question, (line[11:19],))


def _record(rng: random.Random) -> str:
    record = {
        "id": f"ord-{rng.randrange(10**6):06d}",
        "customer": rng.choice(PEOPLE),
        "city": rng.choice(TOWNS),
        "items": [
            {"sku": f"{rng.choice('KLMNP')}{rng.randrange(1000, 9999)}", "count": rng.randrange(1, 9)}
            for _ in range(rng.randrange(1, 4))
        ],
        "total": round(rng.uniform(5, 900), 2),
        "paid": rng.random() < 0.7,
    }
    return json.dumps(record)


def _json(rng: random.Random) -> Hidden:
    line = _record(rng)
    field = rng.choice(("total", "city"))
    record = json.loads(line)
    return Hidden((line,), (), f"What is the {field} of the order with the id {record['id']}?", (str(record[field]),))


KINDS: dict[str, tuple[str, Callable[[random.Random], Hidden]]] = {
    "fact": ("novel", _fact),
    "paraphrase": ("novel", _paraphrase),
    "several": ("novel", _several),
    "chain": ("novel", _chain),
    "function": ("code", _function),
    "constant": ("code", _constant),
    "log": ("log", _log),
    "log, other words": ("log", _log_other),
    "json": ("json", _json),
    "dialogue": ("meeting", _dialogue),
    "dialogue, other words": ("meeting", _dialogue_other),
}
"""Kind -> what it is hidden in, and what makes it."""

SHAPES: dict[str, list[tuple[str, str]]] = _WORDS["shapes"]
"""Shape -> roles, and texts around a document, a question and another one. Their wordings are for judging and choose
nothing. Those that begin with the document share a draft's pass over it."""


def shaped_prompts(
    data: Path, num_tokens: int, num_documents: int, measure: Measure, seed: int, per_shape: int = 2
) -> Iterator[EvidencePrompt]:
    """Documents of about num_tokens with four questions each, the prompts of a document in a row.

    Every shape that begins with the document is asked about `per_shape` of the questions; of the others, each of which
    takes a pass, "ahead" and two more in turn are asked about one.
    """
    texts = _texts(data)
    media = ("novel", "log", "json", "code", "novel", "meeting")
    together = [shape for shape, messages in SHAPES.items() if messages[0][1].startswith("{document}")]
    alone = [shape for shape in SHAPES if shape not in together and shape != "ahead"]
    for number in range(num_documents):
        medium = media[number % len(media)]
        rng = random.Random(f"shapes/{seed}/{num_tokens}/{number}")
        source, lines = _haystack(rng, medium, texts, num_tokens, measure)
        all_hidden = _several_hidden(rng, medium)
        document, spans = _hide(rng, lines, [hidden for _, hidden in all_hidden], medium)
        plan = [(shape, at + turn + number) for at, shape in enumerate(together) for turn in range(per_shape)]
        others = ("ahead", alone[2 * number % len(alone)], alone[(2 * number + 1) % len(alone)])
        plan += [(shape, at + number) for at, shape in enumerate(others)]
        for shape, which in plan:
            which %= len(all_hidden)
            kind, hidden = all_hidden[which]
            second = (which + 1) % len(all_hidden)
            wanted, answers = spans[which], hidden.answers
            if shape == "two questions":
                wanted, answers = wanted + spans[second], answers + all_hidden[second][1].answers
            yield EvidencePrompt(
                f"{number}/{num_tokens}/{shape}/{which}",
                kind,
                f"{number} {source}",
                document,
                hidden.question,
                wanted,
                answers,
                shape,
                all_hidden[second][1].question,
            )


def _several_hidden(rng: random.Random, medium: str) -> list[tuple[str, Hidden]]:
    """Up to four questions of the kinds of a medium, no two of which ask alike."""
    kinds = [(kind, make) for kind, (own, make) in KINDS.items() if own == medium]
    found: dict[str, tuple[str, Hidden]] = {}
    for at in range(60):
        kind, make = kinds[at % len(kinds)]
        hidden = make(rng)
        # Wordings that name what they ask about may come twice.
        is_named = kind in ("json", "log", "constant", "fact")
        key = hidden.question if is_named else " ".join(hidden.question.split()[:5])
        if len(found) < 4:
            found.setdefault(key, (kind, hidden))
    return list(found.values())


def multi_hop(path: Path, limit: int) -> Iterator[EvidencePrompt]:
    """Questions of a set whose evidence stands in several paragraphs: records with "id", "question", "answers", "kind",
    "paragraphs" (title, sentences, indices of the gold ones) and, in MuSiQue, "hops" (answer, paragraph)."""
    for record in _json_lines(path)[:limit]:
        document, spans, starts = "", [], []
        for paragraph in record["paragraphs"]:
            document += f"{paragraph['title']}\n"
            starts.append(len(document))
            for at, sentence in enumerate(paragraph["sentences"]):
                text = sentence.strip()
                if at in paragraph["gold"]:
                    spans.append((len(document), len(document) + len(text)))
                document += text + " "
            document = document.rstrip() + "\n\n"
        ends = [*starts[1:], len(document)]
        hops = [
            tuple(_occurrences(document, hop["answer"], starts[hop["paragraph"]], ends[hop["paragraph"]]))
            for hop in record.get("hops", ())
        ]
        yield EvidencePrompt(
            record["id"],
            record["kind"],
            record["id"],
            document.rstrip(),
            record["question"],
            tuple(spans),
            tuple(record["answers"][:1]),
            hops=tuple(hop for hop in hops if hop),
        )


def _occurrences(text: str, wanted: str, start: int, stop: int) -> list[tuple[int, int]]:
    found = re.finditer(re.escape(wanted), text[start:stop], re.IGNORECASE)
    return [(start + match.start(), start + match.end()) for match in found]


def _json_lines(path: Path) -> list[Any]:
    # Not splitlines: separators such as U+2028 can stand inside a JSON string.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def make_prompts(data: Path, num_tokens: int, per_kind: int, measure: Measure, seed: int) -> Iterator[EvidencePrompt]:
    """Prompts of about num_tokens by texts in a folder, `per_kind` of every kind, the kinds in turn."""
    texts = _texts(data)
    for number in range(per_kind):
        for kind, (medium, make) in KINDS.items():
            rng = random.Random(f"{seed}/{num_tokens}/{kind}/{number}")
            hidden = make(rng)
            source, lines = _haystack(rng, medium, texts, num_tokens, measure)
            document, spans = _hide(rng, lines, [hidden], medium)
            name = f"{kind}/{num_tokens}/{number}"
            yield EvidencePrompt(name, kind, source, document, hidden.question, spans[0], hidden.answers)


def _texts(data: Path) -> dict[str, list[tuple[str, str]]]:
    if (data / "texts.jsonl").is_file():
        fetched = _json_lines(data / "texts.jsonl")
        prose, code = (
            [(each["source"], each["text"]) for each in fetched if each["medium"] == medium]
            for medium in ("english", "python")
        )
        return {"novel": prose, "code": code, "meeting": prose}
    return {
        "novel": _records(data, "prose_novels_0[123]", 30_000),
        "code": _records(data, "code_python_01", 12_000),
        "meeting": _meetings(data / "qmsum" / "val.jsonl"),
    }


def _haystack(
    rng: random.Random, medium: str, texts: dict[str, list[tuple[str, str]]], num_tokens: int, measure: Measure
) -> tuple[str, list[str]]:
    """Where a text is from, and its lines, about num_tokens of them together."""
    lines: list[str] = []
    total = 0
    if medium in texts:
        source, text = rng.choice(texts[medium])
        at = 0 if medium == "code" else rng.randrange(max(1, len(text) - 9 * num_tokens))
        following = iter(text[text.find("\n", at) + 1 :].split("\n"))
    else:
        source = f"{medium} {rng.randrange(10**6)}"
        minute = rng.randrange(500)
        make = _record if medium == "json" else None
        following = (make(rng) if make else _ordinary(rng, minute + step // 3) for step in count())
    for line in following:
        total += measure(line + "\n")
        if total > num_tokens - 120:
            break
        lines.append(line)
    return source, lines


def _hide(
    rng: random.Random, lines: list[str], hidden: list[Hidden], medium: str
) -> tuple[str, list[tuple[tuple[int, int], ...]]]:
    """The lines with others put between them, and the characters of the evidence of each that is hidden."""
    parts: list[tuple[str, int | None]] = [(line, None) for line in lines]
    hidden_lines: list[tuple[str, int | None]] = []
    for at, each in enumerate(hidden):
        hidden_lines += [(line, at) for line in each.wanted] + [(line, None) for line in each.others]
    low, high = int(0.08 * len(parts)), max(int(0.9 * len(parts)), int(0.08 * len(parts)) + 1)
    places = sorted(rng.randrange(low, high) for _ in hidden_lines)
    if medium == "code":
        places = [between_blocks(lines, place, ")]}#") for place in places]
    rng.shuffle(hidden_lines)
    for place, part in sorted(zip(places, hidden_lines, strict=True), key=lambda each: -each[0]):
        parts.insert(place, part)
    spans: list[list[tuple[int, int]]] = [[] for _ in hidden]
    length = 0
    for line, owner in parts:
        if owner is not None:
            spans[owner].append((length, length + len(line.rstrip("\n"))))
        length += len(line) + 1
    return "\n".join(line for line, _ in parts), [tuple(own) for own in spans]


def between_blocks(lines: Sequence[str], place: int, inside: str) -> int:
    """The next place at which a definition of its own may stand. inside: what begins no definition."""
    for at in range(place, len(lines)):
        if lines[at] and not lines[at][0].isspace() and lines[at][0] not in inside:
            return at
    return place


def _records(data: Path, pattern: str, shortest: int) -> list[tuple[str, str]]:
    """Names and texts of the records that are long enough, every novel's front left out."""
    found = []
    for path in sorted((data / "corpus").glob(f"{pattern}.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if len(record["text"]) >= shortest:
                    found.append((record["id"], re.sub(r"\n{3,}", "\n\n", record["text"])))
    return found


def _meetings(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        meetings = [json.loads(line)["meeting_transcripts"] for line in lines]
    return [
        (f"meeting {number}", "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns))
        for number, turns in enumerate(meetings)
    ]
