"""The lines of a text, with what is found about each (`structure`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spec_stack.prefill.sentences import is_prose

LONGEST_RECORD, LONGEST_BLOCK = 64, 32
"""Most tokens of a record or a fenced block that is one unit, and of other blocks: blocks of code up to 64 tokens took
the place of evidence at a keep rate of 0.1 (experiments/LOG.md, "Segments that mean something alone")."""

_BREAK = "(?:\\r\\n?|[\\n\\u2028\\u2029])"
_ANY_BREAK = re.compile(_BREAK)
LINE = re.compile(f"[^\\n\\r\\u2028\\u2029]*+{_BREAK}?(?:[^\\S\\n\\r\\u2028\\u2029]*+{_BREAK})*+")
# A cell in quotes may hold line breaks.
_OPEN_CELL = re.compile('[,;\\t]"')
_MOST_LINES_OF_ROW = 8
_QUOTATION = re.compile("\\s*(?:>\\s?)*+")


@dataclass
class Line:
    """A line with the breaks that end it. content: without blanks at both ends. last: index of the last line that is
    joined to it. head: index of the line that it needs, or -1. is_text: it may hold sentences. is_lead: it speaks of
    the list below it. is_broken: its last sentence goes on in the next line. is_inside: of a region. sign: what a
    comment begins with. margin: its indentation behind the sign of a change, and change that sign, or a blank.
    is_numbered: of a listing. listing: the lines of the listing that it stands for."""

    start: int
    stop: int
    indent: int
    content: str
    is_before_blank: bool
    last: int
    head: int = -1
    is_text: bool = True
    is_lead: bool = False
    is_broken: bool = False
    is_inside: bool = False
    sign: str = ""
    change: str = ""
    margin: int = 0
    is_numbered: bool = False
    listing: Sequence[Line] = ()

    @cached_property
    def is_prose(self) -> bool:
        return self.is_text and is_prose(self.content)

    @cached_property
    def is_wording(self) -> bool:
        """Whether the line is prose, or a comment in prose."""
        return self.has_words and is_prose(self.words)

    @property
    def has_words(self) -> bool:
        """Whether a sentence of the line may go on in another one."""
        return self.is_text or self.is_inside

    @property
    def words(self) -> str:
        """The content without the signs of a comment or a quotation."""
        return _QUOTATION.sub("", self.content[len(self.sign) :], count=1).lstrip() or self.content


def runs(lines: Sequence[Line], goes_on: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Runs of lines without blank lines, as half-open ranges. goes_on: whether the run from a line has another one."""
    start = 0
    for at in range(1, len(lines) + 1):
        if at == len(lines) or lines[at - 1].is_before_blank or not goes_on(start, at):
            yield start, at
            start = at


def split_lines(text: str, first: int, stop: int, blanks: Mapping[int, int]) -> list[Line]:
    """The lines of characters first…stop - 1 of a text. blanks: of a listing, as many in front of the lines that begin
    there are no indentation."""
    lines: list[Line] = []
    start, opened = first, -1
    for match in LINE.finditer(text, first, stop):
        content = match[0].strip()
        # Blank lines at the beginning belong to the first line.
        if match.end() == start or (not content and match.end() < stop):
            continue
        indent = len(match[0]) - len(match[0].lstrip()) - blanks.get(match.start(), 0)
        if content.startswith(">") and not content.startswith(">>> "):
            # As deep as it is quoted.
            indent += content[: len(content) - len(content.lstrip("> "))].count(">")
        if content.count('"') % 2 and 0 <= opened >= len(lines) - _MOST_LINES_OF_ROW:
            start, indent = lines[opened].start, lines[opened].indent
            content = text[start : match.end()].strip()
            del lines[opened:]
            opened = -1
        elif content.count('"') % 2:
            opened = len(lines) if _OPEN_CELL.search(content) else -1
        num_breaks = len(_ANY_BREAK.findall(match[0], len(match[0].rstrip())))
        is_numbered = match.start() in blanks
        lines.append(Line(start, match.end(), indent, content, num_breaks > 1, len(lines), is_numbered=is_numbered))
        start = match.end()
    return lines
