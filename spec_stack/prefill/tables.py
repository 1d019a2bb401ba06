"""Tables of a text: rows by their separators, and the first rows that the others need."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spec_stack.prefill.long_lines import Size
from spec_stack.prefill.text_lines import LONGEST_RECORD, Line, runs

_END_OF_ROW = re.compile("\\\\\\\\(?:\\s*\\\\(?:hline|midrule|bottomrule))?\\Z")
_REST_OF_ROW = re.compile("[|\u2502,;]\\s*[|\u2502,;]")
RULE = re.compile(
    "[-=+|:\u2500-\u257f\\s]*?(?:--|==|\u2500\u2500|\u2550\u2550)[-=+|:\u2500-\u257f\\s]*|"
    "\\\\(?:hline|toprule|midrule|bottomrule)"
)
_QUOTED = re.compile('"[^"]*+"')
_NO_CELLS = re.compile("[(){}\\[\\]<>=]|, ")
# A comment of assembler, Lisp or INI is no row.
_COMMENT = re.compile(";+\\s")
_WIDE_BLANK = re.compile("\\S\\s{2,}+(?=\\S)")
# Names of columns in a first row without a rule below it.
_NAMES = re.compile("[^\\W\\d][^\\d(){}\\[\\]=<>]*+")
_FEWEST_ROWS = 3


def find_tables(lines: Sequence[Line], size: Size) -> None:
    """The rows of a table need its first row, with the rule below it."""
    grids = [_grid(line) for line in lines]
    for start, stop in runs(lines, lambda start, at: bool(grids[start]) and grids[at] == grids[start]):
        if stop - start < _FEWEST_ROWS:
            continue
        rows = lines[start:stop]
        num_rows, first = _rows_of_head(rows), 0
        for at, row in enumerate(rows):
            is_rest = at > num_rows and (_REST_OF_ROW.match(row.content) or row.indent > rows[0].indent)
            row.is_text, row.indent = False, rows[0].indent
            first = first if is_rest else at
            if is_rest and size(rows[first].start, row.stop) <= LONGEST_RECORD:
                rows[first].last = start + at
            elif num_rows and at >= num_rows:
                row.head = start + first if is_rest else start
        rows[0].last = start + max(0, num_rows - 1)


def _grid(line: Line) -> str:
    """What separates the cells of a line, and how often; empty for no row."""
    content = line.content
    if not line.is_text or content[:1] in ("{", "<") or _COMMENT.match(content):
        return ""
    # Rows of LaTeX
    if (content[:1] == "\\" and RULE.fullmatch(content)) or ("&" in content and _END_OF_ROW.search(content[-40:])):
        return "&"
    is_rule = RULE.fullmatch(content) is not None
    if "|" in content or "\u2502" in content or (is_rule and "  " not in content):
        return "|"
    bare = _QUOTED.sub("", content)
    for sign in "\t;,":
        if count := bare.count(sign):
            return f"{sign}{count}" if sign == "\t" or not _NO_CELLS.search(bare) else ""
    return "  " if is_rule or len(_WIDE_BLANK.findall(content)) >= 2 else ""


def _rows_of_head(rows: Sequence[Line]) -> int:
    """How many first rows of a table are its head."""
    rules = [at for at, row in enumerate(rows[:4]) if RULE.fullmatch(row.content)]
    if rules and rules != [0]:
        return (rules[0] or rules[1]) + 1
    has_numbers = [any(map(str.isdigit, row.content)) for row in rows[1:6]]
    if not any(has_numbers) or not _NAMES.fullmatch(rows[0].content):
        return 0
    # Units stand below the names.
    return 1 + (not has_numbers[0] and len(rows) > _FEWEST_ROWS and all(has_numbers[1:]))
