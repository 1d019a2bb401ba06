"""The texts of a prompt by segments, and what is written of them: kept text, verbatim, and a trace of gaps. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spec_stack.prefill.alignment import Span
from spec_stack.prefill.listings import without_numbers
from spec_stack.prefill.prompt_text import union
from spec_stack.prefill.segments import Lines
from spec_stack.prefill.sentences import is_prose, label_end, sentence_ends

ELLIPSIS = "\u2026"
_BREAK = re.compile("\r\n?|[\n\u2028\u2029]")
# What a line of records begins with, in JSON or markup.
_OPENERS = tuple('[{(<"')
# Most lines at each end of a gap that tell what kind of text it was.
_MOST_LINES = 20
_WORDS = "(?:public|private|static|const|let|var|func|fn|pub|use|package)\\b"
_BRACES = re.compile(f"\\S.*[;{{}}]\\Z|//|/\\*|\\*/|{_WORDS}")
# A literal, of languages with either sign.
_LITERAL = re.compile(f"(?!{_WORDS}).*(?:[=:,(\\[{{]|\\breturn)\\s*\\{{[^{{}}]*\\}}?\\Z")
_HASHES = re.compile(
    "#(?!#)|@\\w|(?:def|class|from|import|with|raise|return|elif|except|echo|export)\\b.*\\Z|(?:else|try|finally):\\Z|"
    "(?:if|for|while)\\b.*:\\Z|[\\w.\\[\\]]+ [-+*/|&]?= \\S|[\\w.]+\\(.*\\)\\Z|end\\Z"
)
_DASHES = re.compile("--|(?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|FROM|WHERE|JOIN)\\b|local\\b")


@dataclass(frozen=True)
class TextSegment:
    """A segment of a text: its half-open span of the prompt's tokens, and that of the text's characters. is_break: it
    ends the line of the segments before it."""

    tokens: Span
    characters: Span
    is_break: bool = False


@dataclass(frozen=True)
class Text:
    """A text of a message, and its segments in order. is_whole: it is never pruned."""

    message: int
    part: int | None
    text: str
    is_whole: bool
    segments: list[TextSegment]

    def kept_spans(self, kept: set[int]) -> list[Span]:
        """The characters of the segments whose first token is kept, without blanks behind a gap in a line."""
        if not self.segments:
            return [(0, len(self.text))] if self.text else []
        spans: list[Span] = []
        for segment in self.segments:
            first, last = segment.characters
            if segment.tokens[0] not in kept:
                continue
            if segment.is_break and (not spans or _BREAK.search(self.text, spans[-1][1] - 1, first)):
                # Nothing of its line is kept.
                continue
            if spans and spans[-1][1] == first:
                first = spans.pop()[0]
            elif first and not _BREAK.match(self.text, first - 1):
                first += len(self.text[first:last]) - len(self.text[first:last].lstrip(" \t"))
            spans.append((first, last))
        return spans


def cut_segments(text: str, first: int, starts: Sequence[int], ends: Sequence[int], lines: Lines) -> list[TextSegment]:
    """The segments of a text that begins at a prompt's character `first`. starts, ends: characters of every token.

    Another blank segment than a line's break is part of the next one, or of the one before.
    """
    start, stop = bisect_left(starts, first), bisect_right(ends, first + len(text))
    inside = range(bisect_right(lines.borders, start), bisect_left(lines.borders, stop))
    borders = [start, *(lines.borders[at] for at in inside), max(start, stop)]
    edges = [0, *(starts[lines.borders[at]] + lines.shifts[at] - first for at in inside), len(text)]
    breaks = [False, *(at in lines.breaks for at in inside)]
    segments: list[TextSegment] = []
    blank: TextSegment | None = None
    for tokens, characters, is_break in zip(pairwise(borders), pairwise(edges), breaks, strict=True):
        own = TextSegment(tokens, characters, is_break)
        if blank is not None:
            own = TextSegment((blank.tokens[0], tokens[1]), (blank.characters[0], characters[1]))
        is_blank = not own.is_break and not text[slice(*own.characters)].strip()
        blank = own if is_blank else None
        if tokens[0] < tokens[1] and not is_blank:
            segments.append(own)
    if blank is not None and segments:
        last = segments.pop()
        blank = TextSegment((last.tokens[0], blank.tokens[1]), (last.characters[0], blank.characters[1]))
    return segments if blank is None else [*segments, blank]


def protected_spans(num_tokens: int, texts: Sequence[Text], protect: Sequence[str]) -> list[Span]:
    """Protected token spans: everything outside the texts' segments, and segments with a protected string."""
    free = bytearray(num_tokens)
    for text in texts:
        for segment in () if text.is_whole else text.segments:
            if not any(_meets(text.text, each, *segment.characters) for each in protect):
                start, stop = segment.tokens
                free[start:stop] = b"\x01" * (stop - start)
    return union((at, at + 1) for at in range(num_tokens) if not free[at])


def _meets(text: str, wanted: str, first: int, last: int) -> bool:
    """Whether an occurrence of a string overlaps the characters first…last - 1."""
    return bool(wanted) and text.find(wanted, max(0, first - len(wanted) + 1), last + len(wanted) - 1) >= 0


def whole_segments(num_tokens: int, texts: Sequence[Text], kept: set[int], may_be_empty: bool) -> set[int]:
    """Kept tokens rounded up to whole segments; the first one of a text that must not be empty."""
    whole = set(range(num_tokens))
    for text in texts:
        segments = [set(range(*segment.tokens)) for segment in text.segments]
        chosen = [segment for segment in segments if text.is_whole or not segment.isdisjoint(kept)]
        if not chosen and not (may_be_empty and text.text.strip()):
            chosen = segments[:1]
        whole.difference_update(*segments)
        whole.update(*chosen)
    return whole


def write_spans(text: str, spans: Sequence[Span], marker: str | None) -> str:
    """The kept spans of a text. Where a line break was dropped, a line of the marker stands between them, or a line
    break; where none was, a blank.

    marker: None is an ellipsis, in code in a comment, in place of lines and inside of sentences. Another one stands
    within lines too.
    """
    parts: list[str] = []
    sentences, at = _Sentences(text), 0
    for start, stop in [*spans, (len(text), len(text))]:
        if start > at:
            last = next((part[-1] for part in reversed(parts) if part), "")
            cuts = (sentences.is_cut_at(at), sentences.is_cut_at(start)) if marker is None else (False, False)
            parts.append(_gap(text, at, start, marker, last, cuts))
        parts.append(text[start:stop])
        at = stop
    return "".join(parts)


class _Sentences:
    """The sentences of a text. Asked about places in order, it reads each line once."""

    def __init__(self, text: str) -> None:
        self._text, self._start, self._stop = without_numbers(text)[0], 0, 0
        self._ends: set[int] = set()
        self._is_record = False

    def is_cut_at(self, place: int) -> bool:
        """Whether a place is inside of a sentence. Records that stand in one line hold none."""
        if place in (0, len(self._text)):
            return False
        if place >= self._stop:
            self._go_to(place)
        end = place
        while end > self._start and self._text[end - 1].isspace():
            end -= 1
        return end > self._start and end not in self._ends and not self._is_record

    def _go_to(self, place: int) -> None:
        """Read the line of a place."""
        while self._stop <= place:
            found = _BREAK.search(self._text, self._stop)
            self._start, self._stop = self._stop, found.end() if found else len(self._text) + 1
        line = self._text[self._start : self._stop].rstrip()
        self._ends = {self._start + at for at in (label_end(line), *sentence_ends(line), len(line))}
        self._is_record = line.lstrip()[:1] in _OPENERS and not is_prose(line)


def _gap(text: str, at: int, start: int, marker: str | None, last: str, cuts: tuple[bool, bool]) -> str:
    """What stands for the characters at…start - 1 behind the character `last`, if any. cuts: whether the gap begins,
    and whether it ends, inside of a sentence."""
    dropped, is_end = text[at:start], start == len(text)
    starts_line = not last or _BREAK.match(last) is not None
    found, ends_line = _BREAK.search(dropped), _BREAK.match(dropped, len(dropped) - 1) is not None
    # A blank stands between texts and around a marker, where there is none.
    before = "" if not last or last.isspace() else " "
    behind = "" if is_end or text[start].isspace() else " "
    if any(cuts):
        if found is None:
            return f"{before}{ELLIPSIS}{behind}"
        # The ellipsis of a sentence stands for whole lines too.
        head, tail = f"{before}{ELLIPSIS}" if cuts[0] else "", f"{ELLIPSIS}{behind}" if cuts[1] else ""
        ends = (head or not starts_line) and (ends_line or not is_end)
        return f"{head}{found[0] if ends else ''}{tail}"
    if found or (is_end and starts_line):
        line_break = found[0] if found else ""
        own = marker_of(dropped) if marker is None else marker
        before = "" if starts_line or (is_end and not own) else line_break
        behind = line_break if own and (not is_end or ends_line) else ""
        return f"{before}{own}{behind}"
    return f"{before}{marker}{behind}" if marker else "" if is_end else before and behind


def marker_of(dropped: str) -> str:
    """The marker for dropped lines: an ellipsis, in code as a comment, where no fence tells that text is around it."""
    lines = [line.strip() for line in dropped.split("\n")]
    lines = [line for line in lines[:_MOST_LINES] + lines[_MOST_LINES:][-_MOST_LINES:] if len(line) > 1]
    signs = [
        "--" if _DASHES.match(line) else "//" if _BRACES.match(line) else "#" if _HASHES.match(line) else ""
        for line in lines
        if line[0] not in "\"'[]{}|<" and not _LITERAL.match(line)
    ]
    is_fenced = any(line.startswith(("```", "~~~")) for line in lines)
    if is_fenced or 2 * sum(map(bool, signs)) < max(1, len(lines)):
        return ELLIPSIS
    return f"{max(('#', '//', '--'), key=signs.count)} {ELLIPSIS}"
