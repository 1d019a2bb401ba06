"""Listings whose lines have numbers, as agents' tools show files: each is cut by itself, as what it lists. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spec_stack.prefill.text_lines import LINE, Line, split_lines

# The number of a line: of an agent's file reader, of `cat -n`, "12<tab>", "12:" or "L12:".
_NUMBER = re.compile(
    "^(?: *(\\d{1,6})\u2192|(?=[ \\d]{6}\\t) *(\\d{1,6})\\t|(\\d{1,6})\\t| {0,5}L?(\\d{1,6}): ?)", re.MULTILINE
)
_ARROW, _PADDED, _COLON = 1, 2, 4
_FEWEST_LINES = 3
# Where rows or keys may have such numbers: by how many blanks some lines are indented more than others, or how many
# lines are blank, at least.
_INDENTATION = _FEWEST_BLANK_LINES = 2
# What stands for a listing among the lines around it: neither text nor code.
_PLACEHOLDER = "\u2026="
_NAMES_FILE = re.compile(
    "(?!(?:e\\.g|i\\.e)\\b)(?<![\\w.])[\\w-]{1,80}(?:\\.[\\w-]{1,20}){0,3}\\.[A-Za-z]\\w{0,7}\\b|(?<!\\S)[~.]?/\\w"
)
_MOST_LINES_ABOVE = 3
_LONGEST_LINE_ABOVE = 160


def without_numbers(text: str) -> tuple[str, list[dict[int, int]]]:
    """A text with blanks in place of the numbers of its listings, and of every listing how many blanks stand where its
    lines begin."""
    listings: list[dict[int, int]] = []
    run: list[re.Match[str]] = []
    for match in (*_NUMBER.finditer(text), None):
        if match and run and _follows(text, run[-1], match):
            run.append(match)
            continue
        if len(run) >= _FEWEST_LINES and _is_listing(text, run):
            listings.append({each.start(): len(each[0]) for each in run})
        run = [match] if match else []
    parts, at = list[str](), 0
    for listing in listings:
        for start, width in listing.items():
            parts += [text[at:start], " " * width]
            at = start + width
    return "".join([*parts, text[at:]]), listings


def split_listings(text: str) -> tuple[str, list[Line]]:
    """A text without the numbers of its listings, and its lines: each listing is one, with lines of its own."""
    text, listings = without_numbers(text)
    lines: list[Line] = []
    at = 0
    for listing in listings:
        start, last = min(listing), max(listing)
        lines += split_lines(text, at, start, {})
        at = next(LINE.finditer(text, last)).end()
        indent, own = lines[-1].indent if lines else 0, split_lines(text, start, at, listing)
        lines.append(Line(start, at, indent, _PLACEHOLDER, True, 0, is_text=False, listing=own))
    lines += split_lines(text, at, len(text), {})
    for index, line in enumerate(lines):
        line.last = index
    return text, lines


def find_listings(lines: Sequence[Line]) -> None:
    """A listing needs the line above it that names its file, or else what it stands below."""
    for at, line in enumerate(lines):
        above = range(at - 1, max(-1, at - 1 - _MOST_LINES_ABOVE), -1) if line.listing else ()
        file = next((each for each in above if not lines[each].listing and _NAMES_FILE.search(lines[each].content)), -1)
        if file >= 0:
            line.head = file
        elif above and line.head < 0 and not lines[at - 1].is_before_blank:
            line.head = at - 1 if len(lines[at - 1].content) <= _LONGEST_LINE_ABOVE else -1


def _follows(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Whether a line has the next number of the same form as the line above it."""
    form = one.lastindex or 0
    is_next = form == other.lastindex and int(one[form]) + 1 == int(other[form])
    return is_next and text.find("\n", one.end()) == other.start() - 1


def _is_listing(text: str, run: Sequence[re.Match[str]]) -> bool:
    """Whether lines with such numbers are of a file: rows, keys and short lists have them too."""
    form = run[0].lastindex or 0
    if form == _ARROW or (form == _PADDED and run[0][0][0] == " "):
        return True
    contents = [_rest_of_line(text, match.end()) for match in run]
    first = max(0, run[0].start() - 1)
    above = text[text.rfind("\n", 0, first) + 1 : first]
    if form == _COLON:
        is_key = run[0][0][0] == " " and above.rstrip().endswith((":", "{", "[", "("))
        is_other = is_key and not _NAMES_FILE.search(above)
    else:
        num_tabs = {content.strip().count("\t") for content in contents}
        is_other = "\t" in above or (len(num_tabs) == 1 and num_tabs != {0})
    indents = [len(content) - len(content.lstrip()) for content in contents if content.strip()]
    num_blank = len(run) - len(indents)
    is_indented = max(indents, default=0) - min(indents, default=0) >= _INDENTATION
    return not is_other and (is_indented or num_blank >= _FEWEST_BLANK_LINES)


def _rest_of_line(text: str, at: int) -> str:
    stop = text.find("\n", at)
    return text[at : stop if stop >= 0 else len(text)]
