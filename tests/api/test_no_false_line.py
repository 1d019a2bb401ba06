"""No line of a pruned text says what the document does not: every one is a line of it, sentences of one line, or a
marker; in texts and in kept tokens alike."""

from __future__ import annotations

import itertools
import json
import random
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from spec_stack import PrefillConfig, Pruner
from spec_stack.api.pruned_text import Text, cut_segments, whole_segments, write_spans
from spec_stack.hf.loading import ASSETS, load_tokenizer
from spec_stack.prefill.segments import Segments, find_lines
from tests.api.known_documents import KINDS, false_lines

RATES = (0.05, 0.1, 0.2, 0.35, 0.5)
MARKERS = ("…", "# …", "// …", "-- …")
ENDS = ("\n", "\r\n", "  \n")
LETTERS = "ABCDEFGHIJKLMNOPQR"


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(ASSETS / "target"))


def tokens_of(text: str) -> tuple[list[int], list[int]]:
    """Where every token's characters begin and end."""
    encoded = tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = zip(*encoded.offset_mapping, strict=True)
    return [*starts], [*ends]


def kept_at(text: str, keep_rate: float, seed: int) -> tuple[str, str, list[tuple[int, int]]]:
    """A text at random scores: the pruned text, the kept tokens as text, and the kept spans."""
    starts, ends = tokens_of(text)
    pieces = [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]
    lines = find_lines(pieces)
    segments = Segments(lines.borders, lines.heads, lines.labels)
    scores = torch.rand(len(segments), generator=torch.Generator().manual_seed(seed))
    kept = segments.chosen(scores, PrefillConfig(chunk_size=(1, 32)[seed % 2], keep_first=seed % 3), keep_rate)
    own = Text(0, None, text, False, cut_segments(text, 0, starts, ends, lines))
    spans = own.kept_spans(whole_segments(segments.num_tokens, [own], kept, may_be_empty=True))
    return write_spans(text, spans, None), "".join(pieces[at] for at in sorted(kept)), spans


@pytest.mark.parametrize("end", ENDS, ids=ascii)
@pytest.mark.parametrize("kind", KINDS)
def test_every_line_is_a_line_or_sentences_of_one_or_a_marker(kind: str, end: str) -> None:
    for seed in range(4):
        document = KINDS[kind](random.Random(f"{kind}/{seed}"), end)
        for keep_rate in RATES:
            text, tokens, spans = kept_at(document.text, keep_rate, seed)
            assert false_lines(document, text, MARKERS) == []
            assert false_lines(document, tokens, ()) == []
            assert spans == sorted(spans)


def test_a_kept_sentence_keeps_nothing_of_the_next_line() -> None:
    text = "".join(f"First of {at}. Second of {at}.\n" for at in range(30))
    for seed in range(6):
        for keep_rate in RATES:
            written, tokens, _ = kept_at(text, keep_rate, seed)
            kept = [line.strip() for line in tokens.splitlines() if line.strip()]
            assert [line for line in written.splitlines() if line != "…"] == kept


@pytest.mark.parametrize("end", ENDS, ids=ascii)
@pytest.mark.parametrize("label", ["", "Mr. Voss: ", "- "])
def test_a_gap_inside_of_a_sentence_is_marked(label: str, end: str) -> None:
    lines = []
    for room in range(6):
        paid = ", ".join(f"the firm of Mr. {letter} paid {room}{at} francs" for at, letter in enumerate(LETTERS))
        lines += [f"{label}The board of room {room} denies that {paid}.", f"Room {room} closed."]
    num_cut = 0
    for seed, keep_rate, last in itertools.product(range(6), RATES, (end, "")):
        for line in filter(str.strip, kept_at(end.join(lines) + last, keep_rate, seed)[0].splitlines()):
            parts = [re.escape(part.strip()) for part in line.split("…")]
            assert any(re.fullmatch(".*".join(parts), each) for each in lines), line
            num_cut += "…" in line and "paid" in line
    assert num_cut > 20


def test_a_row_of_records_has_no_mark_inside() -> None:
    for form in ("minified", "one line"):
        text = shape_of([{"id": at, "price": 7 * at, "size": at % 9} for at in range(120)], form)
        assert not any("…" in kept_at(text, keep_rate, 0)[0].rstrip("… ") for keep_rate in RATES)


def shape_of(records: Sequence[dict[str, int]], form: str) -> str:
    if form == "minified":
        return json.dumps(records, separators=(",", ":"))
    return json.dumps({"items": records}) if form == "one line" else json.dumps(records, indent=2)


@pytest.mark.parametrize("form", ["minified", "one line", "pretty"])
def test_records_keep_their_values(form: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        records = [{"id": at, "price": rng.randrange(10**6), "size": rng.randrange(10**4)} for at in range(120)]
        for keep_rate in RATES:
            for kept in kept_at(shape_of(records, form), keep_rate, seed)[:2]:
                found = re.findall(r'"id": ?(\d+),\s*"price": ?(\d+),\s*"size": ?(\d+)\s*\}', kept)
                known = {tuple(map(str, record.values())) for record in records}
                assert set(found) <= known
                assert len(found) == kept.count('"price"')
                # A token may hold the bracket that opens the next record.
                assert abs(len(found) - kept.count('"id"')) <= kept.count("{")


# Blocks of a subject and what is said of it: the line of the subject, and the others.
LIST_OF_HOSTS = "[{at}.a.org, {at}.b.org, {at}.c.org]"
LONG = "{at}/{at}/{at}/{at}/{at}/{at}/{at}/{at}/{at}/{at}/{at}/{at}"
ATTRIBUTED = {
    "questions and answers": ("Q: What is the port of {name}?", "A: It is {at}."),
    "a transcript": ("{title} Smith  10:{minute:02d} AM", "It is {at}.\nOr {at}9."),
    "a play": ("{upper}.", "The code is {at}.\nNot {at}7."),
    "headings in signs": ("==> {name}.txt <==", "port {at}\nhost {at}.org"),
    "found in files": ("src/{name}.py", "{at}:PORT = {at}\n{at}9:HOST = {at}"),
    "documents": (
        "<source>{name}.txt</source>",
        "<document_content>\nThe port is {at}.\n</document_content>\n</document>",
    ),
    "letters": ("From: {name}@x.org", "Subject: Port {at}\n\nThe port is {at}.\nYours"),
    "terms": ("<dt>{name}</dt>", "<dd>Port {at}</dd>"),
    "YAML documents": (
        "  name: {name}",
        f"spec:\n  port: {{at}}\n  hosts: {LIST_OF_HOSTS}\n  image: registry/{{at}}/{{at}}",
    ),
    "a list of YAML": ("- name: {name}", f"  port: {{at}}\n  hosts: {LIST_OF_HOSTS}\n  image: {LONG}"),
    "blocks with names": (
        'resource "server" "{name}" {{',
        f"  port  = {{at}}\n  host  = h{{at}}\n  image = {LONG}\n}}}}",
    ),
    "rows to insert": ("INSERT INTO {name} VALUES", "({at}, 'host {at}', 'mended'),\n({at}9, 'host {at}9', 'sold');"),
    "statements about a list": (
        "None of this holds for the pump of {name}, in the north:",
        "\n* Its port is {at}.\n* It has {at}9 valves.",
    ),
    "clauses": (
        "{at}.1 Notwithstanding the above, {title} is not liable for",
        "    (i) loss of {at} hours;\n    (ii) any claim above {at}9.",
    ),
    "underlined headings": ("Not in {name}", "{underline}\n\nThe port {at} is open.\nIt has {at}9 valves."),
    "headings with text below": ("### Removed from {name}", "The port {at}.\nValve {at}9."),
    "headings of LaTeX": ("\\section{{Not {name}}}", "The port is {at}.\nOr {at}9."),
    "headings of HTML": ("<h3>Not {name}</h3>", "<p>Port {at}</p>\n<p>Or {at}9.</p>"),
    "quotations": ("On Mon, {name} <{name}@x.org> wrote:", "> The port is {at}.\n> It has {at}9 valves."),
    "a definition list": ("the pump of {name}", ": Its port is {at}.\n: Not {at}9."),
    "topics with numbers": ("{number}. Roof of {name}", "Rejected with {at} votes.\nIt costs {at}9 francs."),
    "lines of a log that go on": (
        "[10:{minute:02d}] {name}: no, not all of it",
        "  the lab has {at}\n  and the roof {at}9",
    ),
    "records named at their end": (
        '    "name": "{name}"',
        '    "port": {at},\n    "hosts": "{hosts}",\n    "owner": "team {at}",',
    ),
}
FRAMES = {"documents": ("<document>", ""), "YAML documents": ("---\nmetadata:", "")}


@pytest.mark.parametrize("form", ATTRIBUTED)
def test_what_is_said_of_one_subject_is_not_kept_below_another(form: str) -> None:
    def block(name: str, at: int) -> list[list[str]]:
        values = {"name": name, "at": at, "title": name.title(), "upper": name.upper(), "minute": at % 60}
        more = {"number": at % 100, "underline": "=" * (7 + len(name)), "hosts": " ".join([str(at)] * 16)}
        return [part.format(**values, **more).split("\n") for part in ATTRIBUTED[form]]

    names = [f"{first}{second}" for first in ("alpha", "beta", "gamma", "delta") for second in ("", "ville", "burg")]
    is_last = form == "records named at their end"
    blocks = [block(name, 4100 + 17 * at) for at, name in enumerate(names)]
    opens, ends = ("  {\n", "  },\n") if is_last else (FRAMES.get(form, ("", ""))[0] + "\n" * (form in FRAMES), "")
    parted = "" if form in FRAMES or is_last or form == "a list of YAML" else "\n"
    of_block = ["\n".join([*said, *subject] if is_last else [*subject, *said]) + "\n" for subject, said in blocks]
    text = "".join(f"{opens}{lines}{ends}{parted}" for lines in of_block)
    owner = {line: at for at, (subject, said) in enumerate(blocks) for line in (*subject, *said) if line}
    shared = {line for _, said in blocks for line in said if sum(line in other for _, other in blocks) > 1}
    num_kept = 0
    for seed in range(4):
        for keep_rate in RATES:
            kept = [line for line in kept_at(text, keep_rate, seed)[0].splitlines() if line in owner]
            subject = -1
            for line in reversed(kept) if is_last else kept:
                if line in blocks[owner[line]][0]:
                    subject = owner[line]
                elif line not in shared:
                    assert subject == owner[line], (keep_rate, kept)
                    num_kept += 1
    assert num_kept > 20


def test_numbers_and_words_of_one_line_stay_whole() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        numbers = [str(rng.randrange(10**5, 10**9)) for _ in range(400)]
        for text in (*(by.join(numbers) for by in ", ;"), "".join(f"<td>{each}</td>" for each in numbers)):
            for keep_rate in RATES:
                for kept in kept_at(text, keep_rate, seed)[:2]:
                    assert set(re.findall(r"\d+", kept)) <= set(numbers)
        thai = "".join(f"รหัสของห้องที่ {at} คือ {4 * at} และประตูนี้ปิดอยู่เสมอ " for at in range(80))
        words = set(thai.split())
        emoji = "👨\u200d👩\u200d👧\u200d👦"
        family = "".join(f"{emoji}👍🏽{at}" for at in range(150))
        for keep_rate in RATES:
            for kept in kept_at(thai, keep_rate, seed)[:2]:
                assert set(kept.replace("…", "").split()) <= words
            text = kept_at(family, keep_rate, seed)[0]
            assert re.sub(f"{emoji}|👍🏽|[ …]", "", text).isdecimal()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_pruner_writes_no_false_line(kind: str, pruner: Pruner) -> None:
    document = KINDS[kind](random.Random(kind), "\n")
    for keep_rate in RATES:
        for marker in (None, "", "[…]"):
            messages = [{"role": "user", "content": f"{document.text}\nWhat is 17?"}]
            result = pruner.prune(messages, keep_rate=keep_rate, marker=marker)
            # A marker that is named stands within lines too.
            text = result.messages[0]["content"].replace("[…]", "")
            assert false_lines(document, text, (*MARKERS, "What is 17?")) == []


@pytest.fixture(scope="module")
def pruner() -> Pruner:
    return Pruner.from_pretrained(device="cpu")


FORMS = {
    "paragraph": ("", "", 78),
    "item": ("- ", "  ", 76),
    "number": ("12. ", "    ", 88),
    "deep item": ("      * ", "        ", 72),
    "argument": ("        timeout (float): ", "            ", 100),
    "field": (":param timeout: ", "    ", 80),
    "indented first line": ("    ", "", 66),
    "quote": ("> ", "> ", 72),
    "comment": ("# ", "# ", 79),
    "indented comment": ("        # ", "        # ", 79),
    "comment of C": ("    // ", "    // ", 96),
    "comment of SQL": ("-- ", "-- ", 70),
    "doc comment": ("/// ", "/// ", 100),
}


def wrapped(form: str, rng: random.Random) -> tuple[str, list[list[str]]]:
    """Paragraphs of one form, broken between any words, and the words of every sentence, which no other has."""
    first, others, width = FORMS[form]
    names = map("".join, itertools.product("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz", "aeiou", "lnrst"))
    paragraphs, sentences = [], []
    for _ in range(12):
        own = [[next(names) for _ in range(rng.randrange(6, 16))] for _ in range(rng.randrange(2, 7))]
        coded = [
            [rng.choice((*["{}"] * 95, "{}()", "--{}", "{}=3", "`{}`", "<{}>")).format(word) for word in words]
            for words in own
        ]
        text = " ".join(
            f"{words[0].capitalize()} {' '.join(rest)} ends." for words, (_, *rest) in zip(own, coded, strict=True)
        )
        paragraphs.append(
            textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
        )
        sentences += own
    return "\n\n".join(paragraphs) + "\n", sentences


# How agents' tools and changes write the lines of a file: what stands above it and in front of each line.
PLACE = "--- a/guide.md\n+++ b/guide.md\n@@ -1 +1,99 @@\n"
TOOLS = {
    "cat -n": ("paragraph", "", "{:6d}\t"),
    "colons": ("item", "", "{}: "),
    "arrows": ("indented comment", "", "{:6d}\u2192"),
    "added text": ("paragraph", PLACE, "+"),
    "removed comments": ("indented comment", PLACE, "-"),
    "comments beside a change": ("comment of C", PLACE, " "),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sentence_over_several_lines_of_a_tool_is_kept_whole_or_not_at_all(tool: str) -> None:
    form, above, sign = TOOLS[tool]
    for seed in range(6):
        text, sentences = wrapped(form, random.Random(f"{form}/{seed}"))
        written = above + "".join(f"{sign.format(at)}{line}\n" for at, line in enumerate(text.splitlines(), 95))
        for keep_rate in RATES:
            for kept in kept_at(written, keep_rate, seed)[:2]:
                assert half_kept(sentences, kept) == []


def half_kept(sentences: list[list[str]], kept: str) -> list[list[str]]:
    """What is kept of the sentences of which some words are, and not all."""
    parts = [[word for word in words if word in kept.lower()] for words in sentences]
    return [own for own, words in zip(parts, sentences, strict=True) if own and own != words]


@pytest.mark.parametrize("form", FORMS)
def test_a_sentence_over_several_lines_is_kept_whole_or_not_at_all(form: str) -> None:
    for seed in range(6):
        text, sentences = wrapped(form, random.Random(f"{form}/{seed}"))
        for keep_rate in RATES:
            for kept in kept_at(text, keep_rate, seed)[:2]:
                assert half_kept(sentences, kept) == []
