"""Where a line that is too long to be kept whole is cut: between records, pairs and words, never inside one. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import regex

from spec_stack.prefill.sentences import sentence_ends

Size = Callable[[int, int], int]
"""Tokens that begin in a half-open span of characters."""

# Strings up to so many characters are not cut.
_LONGEST_STRING = 400
# Numbers with separators, strings, brackets, and where a line may be cut.
_MARKS = re.compile(
    f'(?P<whole>"(?:[^"\\\\\\n]|\\\\.){{0,{_LONGEST_STRING}}}+"|(?<![\\d,.])\\d{{1,3}}(?:,\\d{{3}}){{1,4}}(?![\\d]))'
    "|(?P<opens>[\\[{(])|(?P<closes>[\\]})])|(?P<comma>[,;\u3001\uff0c\uff1b\u060c])|(?P<tag></?[A-Za-z][^<>]{0,200}+>)"
    "|(?P<blank>(?<!\\d)\\s(?!\\d))|(?P<other>(?<!\\d)\\s|\\s(?!\\d)|[/|&:.](?!\\d)|(?<!\\d)[/|&:])|(?P<last>\\s)"
)
# Depths of brackets and tags that are told apart; ranks of what may be cut behind it, the best first. Of the ranks from
# _FILLED on, no more are used than a segment's length demands.
_DEPTHS = 6
_TAG, _SENTENCE, _COMMA, _FILLED, _INNER, _BLANK, _OTHER, _BETWEEN_NUMBERS = 6, 7, 8, 8, 9, 10, 11, 12
_EMPTY_TAG = re.compile("<(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\\b", re.IGNORECASE)
_BETWEEN_RECORDS = re.compile("\\s?[\\[({<\"']")
_RANKS = range(_BETWEEN_NUMBERS + 1)
# Shorter records are kept or dropped together: pairs of a record, numbers of a row.
_SHORTEST_RECORD = 16
_GRAPHEME = regex.compile(r"\X")


def cut_long(text: str, start: int, stop: int, size: Size, longest: int) -> Iterator[tuple[int, int]]:
    """The parts of a line, half-open spans of at most `longest` tokens, unless a number is longer."""
    if size(start, stop) <= longest:
        yield start, stop
        return
    line = text[start:stop]
    by_rank: list[list[int]] = [[] for _ in _RANKS]
    for at, rank in _places(line):
        by_rank[rank].append(start + at)
    parts = [(start, stop)]
    for rank in _RANKS:
        places = sorted(by_rank[rank])
        parts = [
            part
            for whole in parts
            for part in ([whole] if size(*whole) <= longest else _cut(whole, places, size, longest, rank >= _FILLED))
        ]
    for part in parts:
        yield from [part] if size(*part) <= longest else _between_graphemes(text, part, size, longest)


def _places(line: str) -> Iterator[tuple[int, int]]:
    """Where a line may be cut, with ranks: a record between its parts, by depth, other text between its sentences."""
    end = len(line.rstrip())
    is_markup = line.lstrip().startswith("<")
    is_record = is_markup or line.lstrip()[:1] in ("[", "{", "(", '"') or '":' in line
    depth, last = 0, 0
    ends = [*sentence_ends(line), end]
    sentence = iter(ends)
    next_end = next(sentence)
    for match in _MARKS.finditer(line, 0, end):
        kind, at = match.lastgroup, match.end()
        while next_end <= match.start():
            if next_end >= last and next_end < end:
                yield next_end, _SENTENCE if is_record else 0
            next_end = next(sentence, len(line) + 1)
        if kind == "whole":
            last = at
        elif kind == "opens":
            depth += 1
        elif kind == "closes":
            depth = max(0, depth - 1)
        elif kind == "comma":
            behind = line[at : at + 2]
            is_cell = not behind[:1].isspace() or behind[1:].isdigit()
            # Tuples of a list, in whatever line.
            is_between = line[at - 2 : at - 1] in (")", "]", "}") and _BETWEEN_RECORDS.match(behind)
            if is_record or is_between:
                yield at, min(depth, _DEPTHS - 1)
            else:
                yield at, _INNER if depth else 1 if is_cell else _COMMA
        elif kind == "tag":
            closes = match[0].startswith("</")
            if closes:
                depth = max(0, depth - is_markup)
            elif not (match[0].endswith("/>") or _EMPTY_TAG.match(match[0])):
                depth += is_markup
            if line[at : at + 1] == "<":
                ends_row = is_markup and closes and line[at : at + 2] != "</"
                yield at, min(depth, _DEPTHS - 1) if ends_row else _TAG
        elif kind == "blank":
            yield match.start(), _BLANK
        elif kind == "other":
            yield match.start() if match[0].isspace() else at, _OTHER
        elif kind == "last":
            yield match.start(), _BETWEEN_NUMBERS


def _cut(
    whole: tuple[int, int], places: Sequence[int], size: Size, longest: int, is_filled: bool
) -> Iterator[tuple[int, int]]:
    """A span cut at places: into parts as long as may be, or into records, short ones together."""
    start, stop = whole
    inside = places[bisect_left(places, start + 1) : bisect_left(places, stop)]
    least = longest if is_filled else _SHORTEST_RECORD
    for first, last in pairwise([start, *inside, stop]):
        # The part up to here is long enough, or would be too long with the next.
        if first > start and (size(start, first) >= least or size(start, last) > longest):
            yield start, first
            start = first
    yield start, stop


def _between_graphemes(text: str, part: tuple[int, int], size: Size, longest: int) -> Iterator[tuple[int, int]]:
    """A span without places, such as a long word, cut between graphemes; a number is not cut."""
    start, stop = part
    before = start
    for match in _GRAPHEME.finditer(text, start, stop):
        at = match.start()
        if at > start and text[at - 1].isdecimal() and text[at].isdecimal():
            continue
        if size(start, at) > longest and before > start:
            yield start, before
            start = before
        before = at
    if size(start, stop) > longest and before > start:
        yield start, before
        start = before
    yield start, stop
