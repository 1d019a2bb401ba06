"""What is written of a pruned text: the kept spans, and the mark of what was dropped."""

from __future__ import annotations

import pytest

from spec_stack.api.pruned_text import marker_of, write_spans


@pytest.mark.parametrize(
    ("lines", "marker"),
    [
        (("x = 1", "y = f(x)"), "# …"),
        (("int x = 1;", "return f(x);"), "// …"),
        (("fn main() {", "if (a) {", "for (;;) {"), "// …"),
        (("const paid = {", "const denied = ["), "// …"),
        (("SELECT a", "FROM b"), "-- …"),
        (("The mayor spoke.", "It rained."), "…"),
        # Python as much as another language
        (("PENDING.extend({",), "…"),
        (("PAID = frozenset({", '    "adam@example.org",', "})"), "…"),
        (("return {",), "…"),
        (("LIMITS = {1: 2}", "NAMES: dict[int, str] = {"), "…"),
        (("NAMES = {", "print(NAMES)", "import os"), "# …"),
    ],
)
def test_dropped_lines_of_code_are_marked_by_a_comment_of_its_language(lines: tuple[str, ...], marker: str) -> None:
    assert marker_of("".join(line + "\n" for line in lines)) == marker


@pytest.mark.parametrize(
    ("spans", "written"),
    [
        ([(0, 18), (35, 36)], "It rained. Then a, …\n"),
        ([(0, 10), (35, 36)], "It rained.\n"),
        ([(11, 18), (27, 36)], "Then a, … late, c.\n"),
        ([(27, 36)], "… late, c.\n"),
        ([(0, 18)], "It rained. Then a, …\n"),
    ],
)
def test_an_ellipsis_stands_inside_of_a_sentence_alone(spans: list[tuple[int, int]], written: str) -> None:
    assert write_spans("It rained. Then a, then b, late, c.\n", spans, None) == written
