"""Lines and sentences as segments: what is never parted, and what a budget of tokens keeps of them."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig, SessionConfig
from spec_stack.prefill.listings import without_numbers
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.recall import recall
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import ChunkSegments, Segments, find_lines, line_borders, make_segments
from spec_stack.prefill.selection import select
from spec_stack.prefill.structure import LONGEST_UNIT, cut_text
from tests.support import reference_segments

LINES = PrefillConfig(chunk_size=4, keep_first=1, keep_last=2)
pieces_of_text = st.lists(st.text(alphabet="aB .!?\n。)”雨|:", max_size=4), min_size=1, max_size=300)


def characters(text: str) -> list[str]:
    return list(text)


def texts_of(pieces: list[str]) -> list[str]:
    borders = line_borders(pieces)
    return ["".join(pieces[start:stop]) for start, stop in itertools.pairwise(borders)]


@given(pieces_of_text)
def test_units_part_a_text_without_gaps_and_none_is_too_long(pieces: list[str]) -> None:
    borders = line_borders(pieces)
    assert borders[0] == 0
    assert borders[-1] == len(pieces)
    assert all(0 < stop - start <= LONGEST_UNIT for start, stop in itertools.pairwise(borders))


# What other lines, above or below, are looked at for.
_MARKS = (
    "## Heading¦# Title¦Title¦=====¦---¦- item¦1. Budget¦(a) clause¦x:¦key: value¦```py¦```¦~~~¦<!--¦-->¦/*¦*/¦"
    "int a;¦}¦{¦[¦foo() {¦#if 0¦#else¦#endif¦cat <<EOF¦EOF¦| a | b |¦|---|---|¦a,b¦1,2¦> quoted¦[server]¦"
    "[[rules]]¦name: z¦--- a/x¦+++ b/x¦@@ -1 +1 @@¦+a¦\\section{A}¦\\hline¦<h3>T</h3>¦<doc>¦</doc>¦Q: what?¦"
    '10:41 Ada:¦@dec¦a, "b¦x \\¦def f(x):¦It is not¦true that¦None of the following:¦: def¦foo.py¦12: code¦'
    "INSERT INTO x VALUES¦"
)
_lines_of_marks = st.lists(
    st.tuples(
        st.sampled_from(["", "  ", "    "]),
        st.sampled_from(_MARKS.split("¦")),
        st.sampled_from(["\n", "\n\n", "", "\r\n"]),
    ),
    max_size=8,
)


@given(_lines_of_marks)
def test_any_mix_of_marks_is_cut_without_gaps_also_at_the_end_of_a_text(parts: list[tuple[str, str, str]]) -> None:
    text = "".join(itertools.chain.from_iterable(parts))
    units = cut_text(text, lambda start, stop: stop - start)
    assert "".join(text[unit.start : unit.stop] for unit in units) == text
    assert all(-1 <= unit.head < len(units) and unit.head != at for at, unit in enumerate(units))


NUMBERINGS = ("{:6d}\t", "{:6d}\u2192", "{}\t", "{}:", "{}: ", "L{}: ")


def units_in_lines(text: str, numbering: str = "") -> list[tuple[object, ...]]:
    """Where the units of a text and their heads begin and end, in lines and characters, without the lines' numbers."""
    lines = text.split("\n")
    numbers = [numbering.format(number) for number in range(95, 95 + len(lines))]
    written = [number + line for number, line in zip(numbers, lines, strict=True)]
    starts = [0, *itertools.accumulate(len(line) + 1 for line in written)]
    own = [0, *itertools.accumulate(len(line) + 1 for line in lines)]

    def place(at: int) -> int:
        line = min(bisect_right(starts, at), len(lines)) - 1
        return own[line] + max(0, at - starts[line] - len(numbers[line]))

    units = cut_text("\n".join(written), lambda start, stop: (place(stop) - place(start) + 3) // 4)
    contents = [text[place(unit.start) : place(unit.stop)] for unit in units]
    # Blanks between a number and its line belong to neither.
    spans = [
        (place(unit.start) + len(content) - len(content.lstrip()), place(unit.stop))
        for unit, content in zip(units, contents, strict=True)
    ]

    def is_number(at: int) -> bool:
        return not (contents[at].strip() or units[at].is_break)

    def head_of(at: int) -> tuple[int, int] | None:
        head = units[at].head
        return None if head < 0 else head_of(head) if is_number(head) else spans[head]

    return [(*spans[at], head_of(at), units[at].is_label) for at in range(len(units)) if not is_number(at)]


@pytest.mark.parametrize("numbering", NUMBERINGS)
@pytest.mark.parametrize("path", ["spec_stack/prefill/tables.py", "docs/faq.md", "pyproject.toml", "CHANGELOG.md"])
def test_a_numbered_listing_is_cut_as_what_it_lists(path: str, numbering: str) -> None:
    text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8").rstrip()
    assert units_in_lines(text, numbering) == units_in_lines(text)


@given(st.lists(st.tuples(st.sampled_from(["", "  ", "    "]), st.sampled_from(_MARKS.split("¦"))), min_size=3))
def test_numbers_of_lines_change_no_unit_of_any_mix_of_marks(parts: list[tuple[str, str]]) -> None:
    # Blank lines at the beginning belong to the first line, without numbers.
    text = "\n".join(["x", *map("".join, parts)])
    assert units_in_lines(text, "{:6d}\t") == units_in_lines(text)


@pytest.mark.parametrize(
    "text",
    [
        "10:41 one\n11:42 two\n12:43 three\n",
        "1\tone\t3\n2\ttwo\t4\n3\tthree\t5\n",
        "1: one\n2: two\n",
        "1: one\n2: two\n3: three\n",
        '{\n    1:  "one",\n    2:  "two",\n    3:  "three",\n}\n',
        'x = {\n        1: ["one"],\n        2: [\n 3: ""]}\n',
        "     1\tone\n     2\ttwo\n",
        "1: one\n3: two\n5: three\n",
        "1: one\n2\u2192two\n     3\tthree\n",
        "1. one\n2. two\n3. three\n",
        "1 | one\n2 | two\n3 | three\n",
        "id\tname\tcity\n1\tAlice\tParis\n2\t\tRome\n3\tCarol\tOslo\n",
        "id\tname\n1\tAlice\n2\t  Bob\n3\tCarol\n",
        "1\tAlice\tParis\n2\t  Bob\tRome\n3\tCarol\tOslo\n",
        "1: one\n2:\n3: three\n",
        "10:41 one\n11:\n12:43 three\n",
        "order_id\tcustomer\n100001\tAlice\n100002\tBob\n100003\tCarol\n",
        "weekdays:\n  1: rest\n  2: \n  3: work\n  4: \n  5: rest\n",
        "def f():\n  x = {\n    8:  'a',\n    9:  'b',\n    10: 'c',\n  }\n",
    ],
)
def test_what_has_other_numbers_is_no_listing(text: str) -> None:
    assert without_numbers(text) == (text, [])


LISTING = "     1\tx = 1\n     2\t\n     3\ty = 2\n"


@pytest.mark.parametrize(
    ("above", "head"),
    [
        ("Lines of src/db.py:\n", "Lines of src/db.py:"),
        ("## Result\n\nLines of src/db.py\n", "Lines of src/db.py"),
        ("[File: /t/models.py (210 lines total)]\n(94 more lines above)\n", "[File: /t/models.py (210 lines total)]"),
        ("It is edited, e.g. here. Here is `cat -n` on /app/Dockerfile:\n", "Here is `cat -n` on /app/Dockerfile:"),
        ("Read(src/a.py)\n  Read 40 lines\n", "Read(src/a.py)"),
        ("cat -n Makefile\n", "cat -n Makefile"),
        (f"src/a.py\n{LISTING}...\n", "src/a.py"),
        ("Version 1.2 of it.\n\n", None),
    ],
)
def test_a_line_of_a_listing_needs_the_line_that_names_its_file(above: str, head: str | None) -> None:
    heads = heads_of(f"{above}    11\tu = 1\n    12\t\n    13\tv = 2\nIt ends.\n")
    assert {heads.get("11\tu = 1\n    12"), heads.get("13\tv = 2")} == {head}


def test_a_sentence_of_a_listing_needs_its_number() -> None:
    text = "".join(f"{number:6d}\tIt is one. It is two.\n" for number in range(1, 4))
    units = cut_text(text, lambda start, stop: stop - start)
    heads = [(text[unit.start : unit.stop], text[units[unit.head].start : units[unit.head].stop]) for unit in units]
    assert heads[5:7] == [("It is one.", "     2\t"), (" It is two.", "     2\t")]


@pytest.mark.parametrize(
    "opened",
    [
        "# Alpha\n\n## Install\n\nRun it.",
        "[tool.ruff]\nline-length = 120\n\n[tool.mypy]\nstrict = true",
        "It runs.\n\n```sh\nmake",
        "x();\n\n/* It is a function",
        "#ifdef A\nx();\n#else",
        "x = 1\n\nservers:",
        "x = 1\n\nThe servers are:",
        "The end is near.\n\nThe server waits in vain for all of the",
        "if x:\n    y(\n        z",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a",
    ],
)
@pytest.mark.parametrize(
    "below", ["first thing that I want is a fix.\n", "- an item\n", "    x = 2\n", "*/\n", "```\n", "#endif\n"]
)
def test_what_a_listing_opens_ends_with_it(opened: str, below: str) -> None:
    listing = "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(opened.split("\n"), 1))
    text = f"cat -n src/a.py\n{listing}{below}\nPlease mend it.\n"
    units = cut_text(text, lambda start, stop: (stop - start + 3) // 4)
    first = len(text) - len(f"{below}\nPlease mend it.\n")
    behind = [unit for unit in units if unit.stop > first]
    assert behind[0].start == first
    assert all(unit.head < 0 or units[unit.head].start < 16 or units[unit.head].start >= first for unit in behind)


def test_a_sentence_ends_with_its_stops_and_a_line_with_its_breaks() -> None:
    pieces = ["One", " two", ".", " Three", "?!", "\n\n", "Four", "\n"]
    assert texts_of(pieces) == ["One two.", " Three?!\n\n", "Four\n"]
    # All sentences of a line need the break that ends it.
    lines = find_lines(pieces)
    assert (lines.borders, lines.heads, {*lines.labels}) == ([0, 3, 5, 6, 8], [2, 2, -1, -1], {2})
    # A token in which a sentence and its line end is kept with all of the line.
    lines = find_lines(["One", " two", ".", " Three", "?!\n\n", "Four", "\n"])
    assert (lines.borders, lines.heads, lines.shifts[2]) == ([0, 3, 4, 5, 7], [2, 2, -1, -1], 2)


# Units by "¦".
UNITS = {
    "stops in numbers": '{"total": 759.41, "paid": true}\n',
    "stops in names": "see self.segments.borders in segments.py, v2.5\n",
    "stops in strings": 'raise E("no.", 3)\n',
    "stops in quotes and brackets": '"It broke."¦ (Twice.)¦ So?',
    "code": "def area(width, height):\n¦    return width * height\n\n\n¦SIZE = 12\n",
    "a log": "12:00:01 WARN disk full\n¦12:00:02 INFO ok\n",
    "records": '{"id": 0, "city": "Perrin"}\n¦{"id": 1, "city": "Perrin"}\n',
    "rows": "| name | sum |\n|---|---|\n¦| oak | 12 |\n¦| fir | 9 |\n",
    "stops of scripts without spaces": "昨日は雨だった。¦今日は晴れ。\n¦明日は?",
    "an instruction": "COPY . /app\n",
    "ordinals and streets": "Sie kam am 3. Oktober.¦ Er wohnt in der Hauptstr. 7.¦ Es waren 5.¦ Danach ging er.\n",
    "words of a list": "Ant\n¦Bee\n¦Cow",
    "small words of a list": "ant\n¦bee",
    "pairs": "Kind: List\n¦items:",
    "words of a list without capitals": "苹果\n¦香蕉",
    "a cell of several lines": "| name | note |\n|---|---|\n¦| Ada | not |\n|  | paid |\n¦| Bob | paid |\n",
    "one sentence": "It is not\ntrue that the bridge is old.\n",
    "one sentence before a name": "The committee denied that\nThe Baron had paid.\n",
    "one sentence with a clause": "If the buyer is a company,\nthe tax is 0 %.\n",
    "one sentence before a number": "The code of the vault is\n4711 for all of them.\n",
    "one sentence without spaces": "他没有说\n密码是4711。\n",
    "one sentence of a numbered clause": "5.3 It ends in June, unless\nthe Buyer renews it.\n",
    "a number": "7" * 300,
}


@pytest.mark.parametrize("kind", UNITS)
def test_what_means_something_alone_is_a_unit(kind: str) -> None:
    assert texts_of(characters(UNITS[kind].replace("¦", ""))) == UNITS[kind].split("¦")


def heads_of(text: str) -> dict[str, str]:
    """The head of every unit by its text, without breaks."""
    lines = find_lines(characters(text))
    texts = ["".join(text[start:stop]).strip() for start, stop in itertools.pairwise(lines.borders)]
    return {own: texts[head] for own, head in zip(texts, lines.heads, strict=True) if head >= 0}


def test_a_pair_needs_its_records_first_one() -> None:
    for joint in ("\n", ""):
        text = joint.join(f"Name: R{at}\nAge: {at}1\nCode: {at}7\n" for at in range(3))
        assert heads_of(text) == {
            f"{key}: {at}{end}": f"Name: R{at}" for at in range(3) for key, end in (("Age", 1), ("Code", 7))
        }
    # Turns of a conversation are no records.
    assert heads_of("Ann: It rained.\nBo: It did.\n\nAnn: Again.\nBo: Yes.\n") == {}


def test_code_needs_the_scope_that_is_named_above_it() -> None:
    body = "x" * 40
    python = f"class Area:\n    size = 4\n\n    @cached\n    def area(self):\n        call({body})\n\n\ntop = 1\n"
    assert heads_of(python) == {
        "size = 4": "class Area:",
        "@cached\n    def area(self):": "class Area:",
        f"call({body})": "@cached\n    def area(self):",
    }
    for scope, opener in (
        ("export const area = async (a) => {", ""),
        ("pub(crate) fn area(a: u8) -> u8 {", ""),
        ("func (s *Shape) area(a int) int {", ""),
        ("static int area(int a)", "{"),
    ):
        text = f"{scope}\n{opener}{opener and chr(10)}  call({body});\n  go({body});\n}}\n"
        assert heads_of(text)[f"go({body});"] == scope
    assert heads_of(f"if (a) {{\n  call({body});\n  go({body});\n}}\n") == {}


def test_a_change_needs_its_place_and_the_line_that_names_its_file() -> None:
    change = "index 1..2\n--- a/f.c\n+++ b/f.c\n@@ -1,2 +1,2 @@\n x();\n-y();\n+z();\n"
    assert heads_of(f"diff --git a/f.c b/f.c\n{change}") == {
        **dict.fromkeys(("index 1..2", "--- a/f.c", "+++ b/f.c", "@@ -1,2 +1,2 @@"), "diff --git a/f.c b/f.c"),
        **dict.fromkeys(("x();", "-y();", "+z();"), "@@ -1,2 +1,2 @@"),
    }
    assert heads_of(change.partition("\n")[2])["@@ -1,2 +1,2 @@"] == "+++ b/f.c"


def test_what_stands_below_a_heading_needs_it() -> None:
    assert heads_of("## Oslo\n\nIt rains\n\n## Rome\n\nIt is dry\n") == {
        "It rains": "## Oslo",
        "It is dry": "## Rome",
    }
    assert heads_of("# a comment\n\nx = 1\n") == {}


def test_wrapped_lines_of_one_sentence_are_one_unit() -> None:
    wrapped = "This line of the text is as long as the next\none is, but nobody says that the painter\nAda took\nit.\n"
    assert texts_of([wrapped[at : at + 4] for at in range(0, len(wrapped), 4)]) == [wrapped]


# Units by "¦", of lines that are too long together for one.
FILLER = "Operators announce a closure a week before it begins.¦ " * 9
PLACE = "--- a/f.c\n¦+++ b/f.c\n¦@@ -1,2 +1,2 @@\n"
WRAPPED = {
    "an item": f"- {FILLER}Requests of all the regions are\n  never kept when one of them is closed.\n",
    "a numbered item": f"1. {FILLER}Requests of the regions are not\n   Alpha's own, so the\n   store drops them.\n",
    "an argument": f"    timeout (float): {FILLER}It is not true that the\n        server waits.\n",
    "an indented first line": f"   {FILLER}It is wrong to say that the\nserver waits.\n",
    "a call": f"{FILLER}It is an error that the client\ncalls close() twice, and so the\nserver waits.\n",
    "an option": f"{FILLER}It is an error that the client\n--flush=no was ever given to\nwaits.\n",
    "a variable": f"{FILLER}It is wrong that in all of the regions\nx=3 is the default of every client\nthere.\n",
    "a tag": f"{FILLER}It is an error that the client\nwrites <title> into the page, and so the\nserver waits.\n",
    "a time": f"{FILLER}It is not true that the backups\nthat begin at 10:00:00 in the night are\nkept.\n",
    "code in all lines": "A client that calls open() must not be one of the\nowners that "
    "call go() at once or later in any of\nthe(m).\n",
    "a comment": "x = 1\n¦# It is not true that\n# Alpha waits for it.\n¦# The end.\n¦x = 2\n",
    "a comment of C": "x();\n¦// It is not true that\n// Alpha waits for x.\n¦y();\n",
    "a block of C": f"/**\n¦ *¦ {FILLER}It is not true that\n * Alpha waits for a call of x().\n¦ */\n",
    "a comment of SQL": "-- It is not true of any of the clients that\n-- Alpha waits for one.\n¦SELECT 1;\n",
    "a comment in a fenced block": "```python\n¦" + "x = 1\n¦" * 30 + "# It is wrong that\n# Alpha waits.\n¦```\n",
    "sentences in a fenced block": "```\n¦" + "x = 1\n¦" * 30 + "It is one. It is two.\n¦```\n",
    "a list in a quotation": f"> -¦ {FILLER}It is not true that the\n>   server waits.\n",
    "a number in a comment": "# It is not true that in the week that\n# 42 servers waited there.\n¦x = 1\n",
    "operators": f"{FILLER}It is not true that for n > 0 in a | b\nthe server waits.\n",
    "a comment with semicolons": "; Each of them is logged with its name and the\n; time of it. Nobody there\n"
    "; has said that the gateway\n; waits.\n¦mov a\n",
    "capitals": "IN NO EVENT UNLESS REQUIRED BY LAW OR AGREED TO IN\n"
    "WRITING WILL ANY HOLDER OF IT OR ANY OTHER OF THEM\nBE LIABLE.\n",
    "nouns": "Der Vorstand bestreitet den Bericht der ersten Zeitung, wonach alle\nKunden ihr Geld verloren haben.\n",
    "short lines": "It is not true\nthat the server\nnever waits\nfor them.\n",
    "added text": f"{PLACE}¦+It is not true that the server waits for the\n+client of another thread.\n¦+It\n",
    "text that is added with an empty line": f"{PLACE}¦+Conceptually it is organized around a model.  No model gives"
    ' the two\n+"other" ones to the server.\n¦+\n¦+It ends.\n',
    "an item that is added": f"{PLACE}¦+- It is not true that the server waits for the\n+  client of another thread.\n",
    "a comment of C that is added": f"{PLACE}¦+/**\n¦+ * It is not true that the server waits for the\n"
    "+ * client of another thread.\n¦+ */\n",
    "a comment that is removed": f"{PLACE}¦-    # It is not true that\n-    # Alpha waits for it.\n¦     x\n",
    "a comment beside a change": f"{PLACE}¦     // It is not true that\n     // Alpha waits for it.\n¦+x\n",
    "a short line": "No pipe of another thread.¦ It is wrong that the\nowner of such a\npipe waits.\n",
}


def words_of(text: str) -> list[str]:
    return re.findall(r"\s+|\S+", text)


def test_a_comment_that_is_too_long_for_a_unit_is_cut_into_sentences_with_its_sign() -> None:
    text = "".join(f"# Client number {n} never\n# pays for a thing. It is of\n" for n in range(20))
    lines, pieces = find_lines(words_of(text)), words_of(text)
    units = ["".join(pieces[start:stop]) for start, stop in itertools.pairwise(lines.borders)]
    assert units[:3] == [
        "#",
        " Client number 0 never\n# pays for a thing.",
        " It is of\n# Client number 1 never\n# pays for a thing.",
    ]
    assert (lines.heads[0], {*lines.heads[1:-1]}, lines.heads[-1]) == (len(units) - 1, {0}, -1)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_sentence_over_several_lines_is_one_unit(kind: str) -> None:
    units = [" ".join(unit.split()) for unit in WRAPPED[kind].split("¦")]
    found = [" ".join(unit.split()) for unit in texts_of(words_of(WRAPPED[kind].replace("¦", "")))]
    # A label is a unit of its own.
    assert [" ".join(found[: len(found) - len(units) + 1]), *found[len(found) - len(units) + 1 :]] == units
    assert len(found) - len(units) <= (FILLER in WRAPPED[kind])


@pytest.mark.parametrize(
    "text",
    [
        "def total_of_prices(prices, with_tax=False):\n¦    assert prices is not None, with_tax\n",
        "    if prices is None and the_path.exists():\n¦        raise a_value_error\n",
        "the first of the values that go() returns here:\n¦and the second one of them\n",
        "# listen on all of the addresses of this host: 80\n¦# name: alpha\n",
        "# pears\n¦# apples\n¦# - apples of the first kind, of which there are\n¦# - others\n",
        "// the first value that is there\n¦# the second\n",
        "# the value of the first of all things that are in\n¦the value of x\n",
        "# the value of the first of all things that are in\n¦    # the value of x\n",
        "Alpha Beta of the large accounting department\n¦Delta.\n",
        "from collections.abc import Mapping, Sequence, Callable\nfrom a import b\n¦from c import d\n",
        "Maxime Rouyrre\nmayeut\n¦mbaluna\n",
        "# define first_name_of_the_thing first_name\n¦# define second_name_of_the_thing second\n",
        "Alice Smith of the accounting department\n¦Bob Miller of the sales department\n¦Carol of nothing\n",
        "level=info the client alpha asks for a page\n¦level=info the client beta asks for a page\n",
        "the client asked for x=1 of region alpha and got it\n¦the client asked for x=2 of region beta, and not\n",
        f"{PLACE}¦-It is not true that the server waits for the\n¦+client of another thread.\n",
        f"{PLACE}¦+    # It is not true of the server that\n¦+        # Alpha waits for it.\n¦+\n¦+# It is so.\n",
        f"{PLACE}¦ def open_of_file(file_name, protocol=None, writeback=False):\n¦     import dbm\n",
        f"{PLACE}¦     # It is not true of the server that\n¦         # Alpha waits for it.\n",
        "12:00:01 the client alpha asks for a long page\n¦12:00:02 the client beta asks for a long page\n",
    ],
)
def test_lines_of_code_and_of_logs_are_no_sentence(text: str) -> None:
    assert texts_of(characters(text.replace("¦", ""))) == text.split("¦")


def test_a_fenced_block_has_its_own_sections_and_ends_none_outside() -> None:
    ports = "\n".join(f"port{at} = {at}" for at in range(12))
    text = f"## Old\n\n```ini\n[north]\n{ports}\n```\n\nIt is gone\n"
    heads = heads_of(text)
    assert (heads["port3 = 3"], heads["[north]"], heads["```ini"]) == ("[north]", "```ini", "```")
    assert heads["```"] == heads["It is gone"] == "## Old"


def test_lines_of_here_documents_comments_and_branches_need_what_opens_them() -> None:
    lines = "\n".join(f"port{at}=1{at};" for at in range(12))
    for opens, closes in (("cat > x <<EOF", "EOF"), ("/* not used:", "*/"), ("<!-- old", "-->"), ("#if 0", "#endif")):
        heads = heads_of(f"{opens}\n{lines}\n{closes}\nport=99;\n")
        assert (heads["port3=13;"], heads[opens], heads.get("port=99;")) == (opens, closes, None)
    heads = heads_of(f"#ifdef A\n{lines}\n#else\nport=99;\n#endif\n")
    assert (heads["port=99;"], heads["#else"]) == ("#else", "#ifdef A")
    # A guard against reading a file twice says nothing.
    assert heads_of("#ifndef A_H\n#define A_H\nint x;\n#endif\n") == {}


def test_a_heading_needs_the_one_that_it_stands_below() -> None:
    text = "## A\n\n### Old\n\nIt rains\n\n# Title\n\nIt is dry\n"
    assert heads_of(text) == {"### Old": "## A", "It rains": "### Old", "It is dry": "# Title"}


def test_rows_of_latex_and_of_several_lines_need_their_head() -> None:
    latex = "\\hline\nName & Age \\\\\n\\hline\nAda & 36 \\\\\nBob & 41 \\\\\n"
    head = "\\hline\nName & Age \\\\\n\\hline"
    assert heads_of(latex) == {"Ada & 36 \\\\": head, "Bob & 41 \\\\": head}
    rows = ['1,"It rains.\nIt pours."', '2,"It is dry.\n\nIt stays so."', "3,none"]
    assert heads_of("id,note\n" + "\n".join(rows) + "\n") == dict.fromkeys(rows, "id,note")
    # A table ends at a blank line.
    assert heads_of("id,note\n1,oak\n2,fir\n\n3,elm\n") == {"1,oak": "id,note", "2,fir": "id,note"}
    # Units stand below names.
    assert heads_of("time,flow\ns,l/min\n0,3.1\n1,3.0\n2,2.7\n")["1,3.0"] == "time,flow\ns,l/min"


def test_items_of_yaml_need_the_key_that_they_stand_below_without_indentation() -> None:
    items = [f"- port: {at}\n  tags:\n  - a\n  - b" for at in range(3)]
    assert heads_of("servers:\n" + "\n".join(items) + "\n") == dict.fromkeys(items, "servers:")


@pytest.mark.parametrize("sign", ["{n}.", "{n})", "({n})", "{a}.", "*", "+", "•", "-", "・"])
def test_an_item_that_ends_with_a_colon_needs_no_other_item(sign: str) -> None:
    for key in ("The pump of hall {n} (old):", "**Hall {n}**:", "Hall, room {n}："):
        signs = [sign.format(n=at, a="abcdefghijkl"[at]) for at in range(12)]
        items = [f"{own} {key.format(n=at)}" for at, own in enumerate(signs)]
        said = [f"It holds {at}9 litres of oil, and is older than all others of the house." for at in range(12)]
        text = "".join(f"{item}\n   {below}\n" for item, below in zip(items, said, strict=True))
        assert heads_of(text) == dict(zip(said, items, strict=True))
    # Below each other, of two kinds
    halls, rest = ([f"{form} {at}" for at in (1, 2)] for form in ("1. Hall", "- It is blue"))
    text = "".join(f"{hall}:\n- Its pump, {hall[-1]}:\n{blue}\n" for hall, blue in zip(halls, rest, strict=True))
    assert [heads_of(text).get(own) for own in ("1. Hall 2:", *rest)] == [None, "1. Hall 1:", "1. Hall 2:"]


LONG_KEY = "users_that_may_enter_the_office_at_any_time"


@pytest.mark.parametrize("first", ["denied:", "denied = [", '"denied": ['])
@pytest.mark.parametrize(
    "opener",
    [
        *("allowed: # by order", "allowed: &all", "allowed: !!set", f"{LONG_KEY}:", '"$allowed@x": ['),
        *(
            '"allowed": [ // now',
            "ALLOWED: list[str] = [",
            "allowed = frozenset({",
            'allowed["x"] = [',
            "let x: T[] = [",
        ),
    ],
)
def test_a_key_of_any_form_ends_the_list_above_it(first: str, opener: str) -> None:
    closes = "" if first[-1] == ":" else "],\n"
    for blank in ("", "\n"):
        heads = heads_of(f"{first}\n- user x\n{closes}{blank}{opener}\n- user b\n- user c\n")
        assert [heads.get(own) for own in ("- user x", "- user b", "- user c", opener)] == [first, opener, opener, None]


def test_lines_behind_what_closes_a_list_need_no_key_of_it() -> None:
    heads = heads_of("DENIED = [\n'a',\n'b',\n]\nx = 1\nallow(\n'c',\n'd',\n)\n")
    assert heads == {
        **dict.fromkeys(("'a',", "'b',", "]"), "DENIED = ["),
        **dict.fromkeys(("'c',", "'d',", ")"), "allow("),
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Pros:", "Cons & risks:"),
        ("Forbidden:", "What's allowed:"),
        ("Day 1:", "Day 2 (rain):"),
        ("1. Budget of the harbour", "2. What shall we do about the roof?"),
        ("1. Can I smoke?", "2. Can I pay by card?"),
        ("Alice Smith  10:02 AM", "Bob Hill (he/him)  10:04 PM"),
        ("Alice Smith (10:02)", 'Bob "B." Hill, Oslo \U0001f600 (10:04)'),
        ("Q: Is it open?", "Q2 (new): Is it safe?"),
        ("commit abcdef1", "commit abcdef2 (HEAD -> main, tag: v2)"),
        ("[old]", "[ new ]"),
        ("[old]", "[new] # today"),
        ("<h2>Old</h2>", "<H2>New</H2>"),
    ],
)
def test_what_is_like_the_line_that_names_others_takes_its_place(first: str, second: str) -> None:
    heads = heads_of(f"{first}\nIt rains today.\nIt pours.\n{second}\nIt is dry.\nIt stays so.\n")
    said = "It rains today.", "It pours.", "It is dry.", "It stays so.", second
    assert [heads.get(line) for line in said] == [first, first, second, second, None]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("## Old\n\n", "# new things\n\n"),
        ("## Old\n\n", "# New:\n\n"),
        ("## Old\n\n", "# New\n"),
        ("Old one\n-------\n", "Bob\n---\n"),
        ("Old one\n=======\n", "API\n===\n"),
        ("[old]\n", "[1.2.3]\n"),
        ("[old]\n", '["c".d]\n'),
    ],
)
def test_a_heading_of_another_form_ends_the_one_before(first: str, second: str) -> None:
    heads = heads_of(f"{first}It rains.\n\n{second}It is dry.\nIt stays so.\n")
    assert heads == {"It rains.": first.strip(), **dict.fromkeys(("It is dry.", "It stays so."), second.strip())}


def test_a_heading_directly_below_another_one_is_a_heading() -> None:
    heads = heads_of("## 1.2\n### Old\n- a\n\n## 1.3\n### New\n- b\n")
    assert heads == {"### Old": "## 1.2", "- a": "### Old", "### New": "## 1.3", "- b": "### New"}
    # Comments, rules and documents are none.
    for text in ("# a\n# b\nx = 1\n", "## a\n## b\nx = 1\n", "a: 1\n---\nb: 1\n", "x\n---\n\ny\n"):
        assert heads_of(text) == {}


def test_what_may_be_a_name_in_capitals_stands_between_a_name_and_its_lines() -> None:
    # A speaker, or another room that is denied
    for second in ("BOB (laughing)", "GUARD 2", "ROOM 14", "O\u2019NEIL"):
        heads = heads_of(f"ALICE\nIt rains today.\n{second}\nIt is dry.\nIt stays so.\n")
        assert [heads[line] for line in ("It is dry.", "It stays so.", second)] == [second, second, "ALICE"]


def test_rows_of_markup_and_tuples_of_a_long_line_stay_whole() -> None:
    rows = [f"<tr><td>{at}</td><td>{at}00</td></tr>" for at in range(60)]
    tuples = [f"({at}, 'x', {at}00)" for at in range(60)]
    for text, parts in (
        (f"<table><tr><th>a</th></tr>{''.join(rows)}</table>", rows),
        (f"INSERT INTO t VALUES {', '.join(tuples)};", tuples),
    ):
        found = texts_of(characters(text))
        assert sum(each.count(part) for each in found for part in parts) == len(parts)


def test_one_endless_line_is_cut_between_what_means_something_alone() -> None:
    for text, kept in (
        ("雨" * 300, "雨"),
        ("x" * 300, "x"),
        ("word " * 90, "word"),
        ("[" + "1000000, " * 90 + "]", "1000000,"),
        ("1,234,567; " * 90, "1,234,567;"),
        ("{" + '"key, of": [1, 22], ' * 40 + "}", '"key, of": [1, 22],'),
        ("a['word, of', 'one.two']\t" * 30, "'word,"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467" * 60, "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        ("\u0915\u094d\u0937\u093f" * 90, "\u0915\u094d\u0937\u093f"),
    ):
        found = texts_of(characters(text))
        assert "".join(found) == text
        assert max(map(len, found)) <= LONGEST_UNIT
        assert sum(each.count(kept) for each in found) == text.count(kept)


def test_a_character_of_several_tokens_is_never_parted() -> None:
    # Its text stands at the last of its tokens, and a stop behind it ends the segment.
    assert line_borders(["a", ".", "", "", "雨", "。", "b"]) == [0, 2, 6, 7]


def test_without_text_chunks_take_the_place_of_lines_and_pieces_must_fit() -> None:
    assert isinstance(make_segments(20, None, LINES), ChunkSegments)
    assert not isinstance(make_segments(2, ["a\n", "b"], LINES), ChunkSegments)
    assert isinstance(make_segments(2, ["a\n", "b"], replace(LINES, granularity="chunks")), ChunkSegments)
    with pytest.raises(ValueError, match="1 pieces of text for 2 tokens"):
        make_segments(2, ["a"], LINES)


def test_the_first_tokens_of_a_longer_text_have_its_lines() -> None:
    pieces = ["[a]", "\n", "x = ", "1", "\n", "y = ", "2", "\n", "The end."]
    whole = make_segments(len(pieces), pieces, LINES)
    for num_tokens in range(len(pieces)):
        first = make_segments(num_tokens, pieces, LINES)
        assert first.borders == [*(border for border in whole.borders if border < num_tokens), num_tokens]
        assert first.heads == whole.heads[: len(first)]
    assert 0 in whole.heads


settings_of_a_selection = {
    "pieces": pieces_of_text,
    "keep_rate": st.floats(0.01, 1.0),
    "keep_first": st.integers(0, 3),
    "keep_last": st.integers(1, 3),
    "protected": st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=3),
    "seed": st.integers(0, 10_000),
}


@given(**settings_of_a_selection)
def test_kept_lines_are_whole_within_the_budget_with_both_ends_and_what_is_protected(
    pieces: list[str],
    keep_rate: float,
    keep_first: int,
    keep_last: int,
    protected: list[tuple[int, int]],
    seed: int,
) -> None:
    num_tokens = len(pieces)
    importance = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed))
    # The paper's scoring queries: importance alone, without the factor for rare words (test_question.py).
    config = PrefillConfig(
        keep_rate=keep_rate, chunk_size=3, keep_first=keep_first, keep_last=keep_last, scoring_queries="look_ahead"
    )
    evidence = ScoringInputs(PromptText(range(num_tokens), pieces, protected=protected), importance=importance)
    positions = list(select(evidence, config).positions)
    lines, asking = find_lines(pieces), evidence.candidates.asking_tokens
    assert positions == reference_segments.selected(
        importance.double().tolist(),
        lines.borders,
        lines.heads,
        lines.labels,
        keep_rate,
        3 * keep_first,
        3 * keep_last,
        protected,
        asking=asking,
    )
    segments = make_segments(num_tokens, pieces, config)
    free = {at for start, stop in protected for at in range(start, min(stop, num_tokens))}
    forced = segments.ends(config, free, asking)
    assert forced | free <= set(positions)
    assert len(set(positions) - free) <= max(len(forced - free), math.ceil(keep_rate * num_tokens - 1e-9))
    for start, stop in segments:
        segment = set(range(start, stop))
        assert not (set(positions) - free) & segment or segment <= set(positions)


def test_the_best_line_is_kept_and_one_that_does_not_fit_is_passed_over() -> None:
    pieces = characters("aaaa\n" + "b" * 30 + "\n" + "cc\n" + "d" * 40 + "\n")
    importance = torch.zeros(len(pieces))
    importance[5:36], importance[36:39] = 1.0, 0.5
    config = replace(LINES, keep_rate=50 / len(pieces))
    kept = set(select(ScoringInputs(PromptText(range(len(pieces)), pieces), importance=importance), config).positions)
    assert {36, 37, 38} <= kept
    assert not set(range(5, 36)) & kept


def test_tokens_that_are_kept_anyway_carry_no_line() -> None:
    pieces = characters("a" * 9 + "\n" + "b" * 9 + "\n" + "c" * 9 + "\n" + "d" * 10)
    importance = torch.zeros(40)
    importance[0], importance[12], importance[39] = 9.0, 1.0, 9.0
    means = make_segments(40, pieces, LINES).mean_importance(importance, LINES)
    torch.testing.assert_close(means, torch.tensor([0.0, 0.1, 0.0, 0.0]))


def test_the_ends_are_whole_lines_and_a_long_request_before_a_template_is_one_of_them() -> None:
    parts = ["<user>\n", "Title:\n", "a" * 9 + "\n", "b" * 9 + "\n", "c" * 19 + "</user>\n", "<bot>\n"]
    pieces = characters("".join(parts))
    borders = [0, *itertools.accumulate(map(len, parts))]
    template = {*range(borders[1]), *range(borders[5] - 8, borders[6])}
    segments = Segments(borders, heads=[-1, -1, 1, 1, -1, -1], labels={1})

    def ends(keep_first: int, keep_last: int, free: set[int], asking: Collection[int] = ()) -> list[int]:
        config = PrefillConfig(chunk_size=1, keep_first=keep_first, keep_last=keep_last)
        kept = segments.ends(config, free, asking)
        whole = [at for at, (start, stop) in enumerate(segments) if kept.issuperset(range(start, stop))]
        assert kept == {at for each in whole for at in range(borders[each], borders[each + 1])}
        return whole

    assert len(pieces) == segments.num_tokens
    assert ends(0, 1, set()) == ends(0, 32, set()) == [5]
    # What the template takes does not count.
    assert ends(0, 1, template) == ends(0, 21, template) == [4, 5]
    assert ends(0, 29, template) == [1, 3, 4, 5]
    assert ends(0, 33, set()) == ends(0, 42, set()) == [4, 5]
    assert ends(0, 43, set()) == [1, 3, 4, 5]
    # No more of a template than of the rest.
    assert ends(0, 15, {*range(len(pieces) - 40, len(pieces))}) == [1, 3, 4, 5]
    # What asks is one of the ends if it reaches into them, with its head; another line is none.
    asking = {borders[4] - 1}
    assert ends(0, 19, template, asking) == ends(0, 33, set(), asking) == [4, 5]
    assert ends(0, 21, template, asking) == ends(0, 34, set(), asking) == [1, 3, 4, 5]
    assert ends(6, 1, set()) == [5]
    assert ends(7, 1, set()) == ends(23, 1, set()) == [0, 5]
    assert ends(24, 1, template) == [0, 1, 2, 4, 5]
    assert ends(9, 1, {*range(len(pieces))}) == [0, 5]


def test_lines_come_back_within_as_many_tokens_as_the_chunks_that_are_looked_at() -> None:
    pieces = characters("".join(letter * 9 + "\n" for letter in "abcdefgh"))
    importance = torch.ones(80)
    segments = make_segments(80, pieces, LINES)
    config = SessionConfig(recall_threshold=0.5, max_recalled_chunks=3)
    # Three chunks of eight tokens are reached with the third line of ten.
    found = recall(importance, [], segments, replace(LINES, chunk_size=8), config)
    assert found == list(range(30))
