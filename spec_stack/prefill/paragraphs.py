"""Paragraphs: in which lines of prose, lists, quotations and comments a sentence goes on. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from spec_stack.prefill.sentences import (
    SHORTEST_WRAPPED,
    continues,
    ends_sentence,
    is_prose,
    label_end,
    words_with_code,
)
from spec_stack.prefill.text_lines import Line, runs

OPENERS = ("{", "[", "(")
"""What a line ends with that opens others."""
_ENDS_OF_LEADS = (*OPENERS, ":", "\uff1a")
ITEM = re.compile(
    "(?:[-*+\u2022\u2013]|\\(?(?:\\d{1,3}|[A-Za-z]|[ivx]{2,5})[.)])\\s|[\u2022\u30fb\u25cf|]|```|~~~|<[ou]l\\b|\\\\begin\\{"
)
"""What the lines of a list begin with."""
_COUNTED = re.compile("\\d[\\d.,]* [^\\W\\d]")
_COMMENT = re.compile("(?:#+(?!\\s*(?:define|undef|ifn?def|endif|pragma|include)\\b)|//+!?|--|;+|%+)(?=\\s)")
# Fewest words of a line of prose with code among them, beside a line without, and beside another one: fewer join
# lines of code (experiments/LOG.md, "Sentences over several lines").
_WORDS_BESIDE_PROSE, _WORDS_ALONE = 4, 8
# Fewest characters of the first of two lines that are a filled paragraph; any first line is filled beside a short one.
_LONG_LINE = 60


def find_paragraphs(lines: Sequence[Line]) -> None:
    """What of every line tells whether a sentence of it goes on in the next."""
    _find_comments(lines)
    _find_broken(lines)
    _find_inline_code(lines)


def last_line(lines: Sequence[Line], at: int) -> int:
    """The last line of the unit or paragraph that begins with a line."""
    if lines[at].last > at or not is_of_text(lines[at]):
        return lines[at].last
    first = at
    while (
        at + 1 < len(lines)
        and not lines[at].is_before_blank
        and lines[at + 1].last == at + 1
        and (lines[at + 1].indent == lines[at].indent or (at == first and _is_hanging(lines, at)))
        and lines[at + 1].sign == lines[at].sign
        and not ITEM.match(lines[at + 1].words)
        and _goes_on_in(lines[at], lines[at + 1], at > first)
        and is_of_text(lines[at + 1])
    ):
        at += 1
    return at


def _goes_on_in(line: Line, following: Line, is_inside: bool) -> bool:
    """Whether a sentence goes on in the next line. is_inside: it began in an earlier one."""
    # Of commented settings
    is_key = line.sign != "" and label_end(following.words) > 0
    if (line.is_broken or continues(line.words, following.words)) and not is_key:
        return True
    is_open = not (ends_sentence(line.words) or line.words.endswith(_ENDS_OF_LEADS) or label_end(following.words))
    is_listed = " " not in line.words or _begin_alike(line, following)
    return is_inside and is_open and not is_listed and following.words[:1].islower()


def _begin_alike(line: Line, following: Line) -> bool:
    """Whether two lines begin with the same word, as those of a list or a log may."""
    first, second = (each.words.split(maxsplit=1)[:1] for each in (line, following))
    return first == second


def _is_hanging(lines: Sequence[Line], at: int) -> bool:
    """Whether the first line of an item or a paragraph goes on in lines of another indentation."""
    line, following = lines[at], lines[at + 1]
    is_first = not at or lines[at - 1].is_before_blank
    return (
        (following.indent > line.indent or is_first)
        and not line.sign
        and len(line.content) >= SHORTEST_WRAPPED
        and not (ends_sentence(line.content) or line.content.endswith(_ENDS_OF_LEADS) or label_end(following.content))
    )


def _find_inline_code(lines: Sequence[Line]) -> None:
    """A line with code among its words is prose if a long line goes on in it, or it in the next."""
    found = {at: words_with_code(line.words) for at, line in enumerate(lines) if line.has_words and not line.is_wording}
    for at in (*found, *reversed(found)):
        around = [lines[each : each + 2] for each in (at - 1, at) if 0 <= each < len(lines) - 1]
        lines[at].is_wording = any(
            found[at] >= (_WORDS_BESIDE_PROSE if first.is_wording or last.is_wording else _WORDS_ALONE)
            and first.sign == last.sign
            and not first.is_before_blank
            and len(first.words) >= SHORTEST_WRAPPED
            and not (first.words.endswith(_ENDS_OF_LEADS) or _begin_alike(first, last))
            and (first.is_broken or continues(first.words, last.words))
            for first, last in around
        )


def _find_broken(lines: Sequence[Line]) -> None:
    """In a paragraph of which most lines begin with small letters, or which is filled, a long line without a stop goes
    on in the next."""

    def goes_on(start: int, at: int) -> bool:
        is_second = at == start + 1 and _is_hanging(lines, start)
        before = lines[min(start + 1, at - 1)]
        return is_second or (lines[at].indent == before.indent and lines[at].sign == before.sign)

    for start, stop in runs(lines, goes_on):
        rest = lines[start + 1 : stop]
        is_small = len(rest) > 1 and 2 * sum(line.words[:1].islower() for line in rest) >= len(rest)
        if is_small or _is_filled(lines[start:stop]):
            for line, following in pairwise(lines[start:stop]):
                is_long = len(line.words) >= SHORTEST_WRAPPED and not ends_sentence(line.words)
                line.is_broken = is_long and not (line.is_lead or label_end(following.words))


def _is_filled(lines: Sequence[Line]) -> bool:
    """Whether no line of a paragraph had room for the next one's first word, and the last line ends with a stop."""
    if len(lines) < 2 or not ends_sentence(lines[-1].words) or lines[0].words[:1] == "<":
        return False
    longest = max(len(line.words) for line in lines)
    firsts = ["".join(line.words.split(maxsplit=1)[:1]) for line in lines[1:]]
    is_filled = all(len(f"{line.words} {first}") > longest for line, first in zip(lines[:-1], firsts, strict=True))
    # Of two lines the first is the longest as often as not.
    return is_filled and (len(lines) > 2 or longest >= _LONG_LINE)


def _find_comments(lines: Sequence[Line]) -> None:
    """The signs of comments, and of the lines of one in C."""
    is_inside = False
    for line in lines:
        sign = _COMMENT.match(line.content) if line.has_words else None
        line.sign = sign[0] if sign else "*" * (is_inside and line.content.startswith("* "))
        is_inside = "*/" not in line.content and (is_inside or line.content.startswith("/*"))


def is_of_text(line: Line) -> bool:
    """Whether a line may be of a paragraph or of a comment over several lines."""
    return line.is_wording or _is_rest(line)


def _is_rest(line: Line) -> bool:
    """Whether a line that begins with a number may be of a paragraph."""
    return line.has_words and _COUNTED.match(line.words) is not None and is_prose(f"x {line.words}")
