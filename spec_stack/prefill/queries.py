"""The scoring queries: segments of a prompt that may hold its question. Pure.

Every short candidate place is scored; `importance.segment_weights` weighs it by the attention of the opening tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spec_stack.prefill.alignment import Span
from spec_stack.prefill.prompt_text import ChatTurn, PromptText, between
from spec_stack.prefill.segments import line_borders

WINDOW = 160
"""Tokens at the end of a prompt whose own queries score it."""
# Tokens of a place before the window that the draft reads again behind the prompt.
_LEAD = 64
MOST_REPEATED = 5 * _LEAD
"""Most tokens that the draft reads again behind a prompt: the system message's end, an earlier request, both ends of
the last one, and the newest plan of the assistant."""
# Most tokens behind the last turn that open the answer, and as many where no template opens it.
_OPENING, _NO_OPENING = 8, 4
# Tokens before the request's end over which a word's weight halves without a draft.
_HALF_LIFE = 12
# Tokens of a segment where the texts are not known.
_SEGMENT = 16
# Fewest tokens of a segment without a question mark. A template's own line is shorter, and an attention sink.
_FEWEST = 4
# A mark that ends a segment, directly behind a word: `name?.length`, `a ? b : c`, `?id=7` and `parse()?` ask nothing.
_CLOSING = "[\"'`*_)\\]\u2019\u201d\u00bb\u300d\u300f\uff09?!]*"
_QUESTION_MARK = re.compile(
    f"(?:[\\w\"'\u2019\u201d\u00bb*`][\u00a0\u202f]?[?\u037e]|[\uff1f\u061f\u2e2e]){_CLOSING}\\s*\\Z"
)


@dataclass(frozen=True)
class Candidates:
    """The segments of a prompt of num_tokens that may hold its question.

    segments: half-open spans of tokens, in order. is_question: whether each holds a question mark. num_repeated: so
    many first segments are before the window, and are repeated behind the prompt. start: first token of the window.
    opening: last tokens of the prompt, which open the answer. request: the last user message. is_given: the caller
    named the question, which alone has is_question; the other segments are background.
    """

    num_tokens: int
    segments: tuple[Span, ...]
    is_question: tuple[bool, ...]
    num_repeated: int
    start: int
    opening: int
    request: Span
    is_given: bool = False

    @property
    def repeated(self) -> tuple[Span, ...]:
        return self.segments[: self.num_repeated]

    def reaching(self, first: int) -> Candidates:
        """The segments that reach the text from token `first` on, and those of a request that has other turns behind
        it; where there is none, every token of that text scores the prompt."""
        first = min(first, self.num_tokens - 1)
        at = [
            index
            for index, (segment, mark) in enumerate(zip(self.segments, self.is_question, strict=True))
            if segment[1] > first or (mark if self.is_given else self.is_of_earlier_request(segment))
        ]
        num_repeated = sum(index < self.num_repeated for index in at)
        segments = tuple(self.segments[index] for index in at)
        borders = [first, *(start for start, _ in segments[num_repeated:])]
        return replace(
            self,
            segments=segments,
            is_question=tuple(self.is_question[index] for index in at),
            num_repeated=num_repeated,
            start=max(self.start, min(borders)),
        )

    @property
    def asks(self) -> list[bool]:
        """Whether each segment is of a request that has other turns behind it: it asks, however far back it is."""
        return [self.is_of_earlier_request(segment) for segment in self.segments]

    def is_of_request(self, segment: Span) -> bool:
        return self.request[0] <= segment[0] < self.request[1]

    def is_of_earlier_request(self, segment: Span) -> bool:
        """Whether a segment is of the last user message, and other turns are behind that."""
        return self.is_of_request(segment) and self.request[1] <= self.start

    def asking(self, question: Span) -> Candidates:
        """The candidates with a question that the caller names, in the prompt or behind it."""
        start, stop = question
        is_in_place = self.start <= start and stop <= self.num_tokens
        start = start if is_in_place else max(start, stop - MOST_REPEATED)
        room = MOST_REPEATED - (0 if is_in_place else stop - start)
        others = [segment for segment in self.segments if segment[1] <= start or segment[0] >= stop]
        in_place = [segment for segment in others if segment[0] >= self.start]
        before: list[Span] = []
        for segment in reversed(others[: len(others) - len(in_place)]):
            room -= segment[1] - segment[0]
            if room < 0:
                break
            before.insert(0, segment)
        if is_in_place:
            in_place = sorted([*in_place, (start, stop)])
        else:
            before.insert(0, (start, stop))
        segments = (*before, *in_place)
        marks = tuple(segment == (start, stop) for segment in segments)
        return replace(self, segments=segments, is_question=marks, num_repeated=len(before), is_given=True)


def find_candidates(text: PromptText) -> Candidates:
    """Find the segments that may hold the question. Without pieces, segments are runs of tokens.

    The last user message asks, whatever calls and results are behind it; the newest plan of the assistant may ask too,
    and an earlier user message to which the last one refers. A tool's result asks only where no user does.
    """
    num_tokens, pieces = len(text), text.pieces
    turns = text.turns or [ChatTurn("user", span) for span in between(text.template, num_tokens)]
    behind = num_tokens - turns[-1].span[1] if turns else 0
    opening = min(behind, _OPENING) or min(_NO_OPENING, num_tokens)
    # A turn of nothing but what opens the answer is the template's.
    turns = [turn for turn in turns if turn.span[0] < num_tokens - opening] or [ChatTurn("user", (0, num_tokens))]
    last = turns[-1]
    start = max(num_tokens - WINDOW, last.span[0])
    *earlier, request = [turn for turn in turns if turn.role == "user"] or [last]
    places = [end for turn in earlier[-1:] for end in _ends(*turn.span)]
    plans = [turn for turn in turns[:-1] if turn.role == "assistant"]
    places += [end for turn in plans[-1:] for end in _ends(*turn.span)]
    begin, end = request.span
    if request == last:
        places.append((begin, min(begin + _LEAD, start)))
    else:
        places += [(begin, min(begin + _LEAD, end)), (max(begin + _LEAD, end - _LEAD), end)]
    if turns[0].span[0] > 0:
        # The end of the system message, with its template.
        places.append((max(0, turns[0].span[0] - _LEAD), turns[0].span[0]))
    borders = _borders(num_tokens, pieces)
    before = _askable([segment for place in sorted(places) for segment in _cut(borders, *place)], pieces)
    in_place = [] if last.role == "tool" and request != last else _askable(_cut(borders, start, last.span[1]), pieces)
    segments = (*before, *in_place)
    marked = tuple(pieces is not None and _has_mark(pieces, segment) for segment in segments)
    found = Candidates(num_tokens, segments, marked, len(before), start, opening, request.span)
    return found if text.question is None else found.asking(text.question)


def _askable(segments: list[Span], pieces: Sequence[str] | None) -> list[Span]:
    """The segments that are long enough for a question or have its mark; all of them where none is."""
    found = [
        (start, stop)
        for start, stop in segments
        if stop - start >= _FEWEST or (pieces is not None and _has_mark(pieces, (start, stop)))
    ]
    return found or segments


def _ends(start: int, stop: int) -> list[Span]:
    """The beginning and the end of an earlier turn, or all of a short one."""
    if stop - start <= _LEAD:
        return [(start, stop)]
    return [(start, start + _LEAD // 2), (stop - _LEAD // 2, stop)]


def question_words(found: Candidates) -> dict[int, float]:
    """The question's tokens and their weights, up to 1, without a draft.

    A question mark at the request's very end makes its questions all that counts. Elsewhere the request counts by its
    distance from its end, and in full its first line where that is short, and every question.
    """
    marked = [each for each, mark in zip(found.segments, found.is_question, strict=True) if mark]
    inside = [each for each in found.segments if found.is_of_request(each)]
    if inside and inside[-1] in marked:
        marked = [each for each in marked if found.is_of_request(each)]
    weights = {at: 1.0 for segment in marked for at in range(*segment)}
    if found.is_given or not inside or inside[-1] in marked:
        return weights
    (start, end), first = found.request, inside[0]
    if first[0] == start and first[1] - start <= _LEAD // 2:
        weights |= dict.fromkeys(range(*first), 1.0)
    return {at: 0.5 ** ((end - 1 - at) / _HALF_LIFE) for each in inside for at in range(*each)} | weights


def _borders(num_tokens: int, pieces: Sequence[str] | None) -> list[int]:
    return [*range(0, num_tokens, _SEGMENT), num_tokens] if pieces is None else line_borders(pieces)


def _cut(borders: Sequence[int], start: int, stop: int) -> list[Span]:
    """The parts of a span between these borders."""
    parts = ((max(begin, start), min(end, stop)) for begin, end in pairwise(borders))
    return [(begin, end) for begin, end in parts if begin < end]


def _has_mark(pieces: Sequence[str], segment: Span) -> bool:
    return _QUESTION_MARK.search("".join(pieces[slice(*segment)])) is not None
