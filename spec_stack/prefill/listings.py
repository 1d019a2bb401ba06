"""Listings whose lines have numbers, as agents' tools show files: they are cut as what they list. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The number of a line: of an agent's file reader or of `cat -n`; "12<tab>", "12:" or "L12:", but no time.
_NUMBER = re.compile(
    "^(?: *(\\d{1,6})\u2192|(?=[ \\d]{6}\\t) *(\\d{1,6})\\t|(\\d{1,6})\\t| {0,5}L?(\\d{1,6}):(?!\\d\\d\\b) ?)",
    re.MULTILINE,
)
# The first forms of these number nothing but listings.
_SURE_FORMS = 2
_FEWEST_LINES = 3


def without_numbers(text: str) -> tuple[str, dict[int, int]]:
    """A text with blanks in place of the numbers of its listings, and how many blanks the lines have that begin at
    these characters."""
    blanks: dict[int, int] = {}
    run: list[re.Match[str]] = []
    for match in (*_NUMBER.finditer(text), None):
        if match and run and _follows(text, run[-1], match):
            run.append(match)
            continue
        if _is_listing(text, run):
            blanks |= {each.start(): len(each[0]) for each in run}
        run = [match] if match else []
    parts, at = list[str](), 0
    for start, width in blanks.items():
        parts += [text[at:start], " " * width]
        at = start + width
    return "".join([*parts, text[at:]]), blanks


def _follows(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Whether a line has the next number of the same form as the line above it."""
    form = one.lastindex or 0
    is_next = form == other.lastindex and int(one[form]) + 1 == int(other[form])
    return is_next and text.find("\n", one.end()) == other.start() - 1


def _is_listing(text: str, run: Sequence[re.Match[str]]) -> bool:
    """Whether lines with such numbers are of a file: rows, short lists and keys may have them too, but no blank line
    and no indentation."""
    if len(run) < _FEWEST_LINES:
        return False
    return (run[0].lastindex or 0) <= _SURE_FORMS or len({_indent(text, each.end()) for each in run}) > 1


def _indent(text: str, at: int) -> int:
    """How many blanks a line begins with behind its number; -1 for a blank line."""
    stop = text.find("\n", at)
    content = text[at : stop if stop >= 0 else len(text)]
    return len(content) - len(content.lstrip()) if content.strip() else -1
