"""The scoring queries: segments of a prompt that may hold its question. Pure.

Every short candidate place is scored; `importance.segment_weights` weighs it by the last token's attention to it.
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
# Tokens of a place before the window that the draft reads again behind the prompt, and most at the request's end that
# ask (32 lose 3 of 104 prompts: experiments/LOG.md, "Selection with fewer numbers"). Half of it is a short paragraph,
# and a segment where the texts are not known.
_LEAD = 64
MOST_REPEATED = 5 * _LEAD
"""Most tokens that the draft reads again behind a prompt: the system message's end, an earlier request, both ends of
the last one, and the newest plan of the assistant."""
# A mark that ends a segment, directly behind a word: `name?.length`, `a ? b : c`, `?id=7` and `parse()?` ask nothing.
_CLOSING = "\"'`*_)]\u2019\u201d\u00bb\u300d\u300f\uff09?!"
_QUESTION_MARK = re.compile(
    f"(?:[\\w\"'\u2019\u201d\u00bb*`][\u00a0\u202f]?[?\u037e]|[\uff1f\u061f\u2e2e])[{re.escape(_CLOSING)}]*+\\Z"
)
# Fewest tokens of a segment that does not end its request. A template's own line is shorter, and an attention sink; 8
# lose 2 of 26 prompts (same place).
_FEWEST = 4


@dataclass(frozen=True)
class Candidates:
    """The segments of a prompt of num_tokens that may hold its question.

    segments: half-open spans of tokens, in order. asks: whether each is of the question, by its place or its
    question mark. is_marked: whether it asks with a question mark. is_question: whether it counts in full, whatever the
    last token attends to. num_repeated: so many first segments are before the
    window, and are repeated behind the prompt. start: first token of the window. request: the last user message. plan:
    the newest turn of the assistant behind it, if any. is_given: the caller named the question, which alone asks.
    """

    num_tokens: int
    segments: tuple[Span, ...]
    asks: tuple[bool, ...]
    is_marked: tuple[bool, ...]
    is_question: tuple[bool, ...]
    num_repeated: int
    start: int
    request: Span
    plan: Span = (0, 0)
    is_given: bool = False

    @property
    def repeated(self) -> tuple[Span, ...]:
        return self.segments[: self.num_repeated]

    @property
    def asking_tokens(self) -> set[int]:
        """The tokens of the segments that ask."""
        return {at for segment, asks in zip(self.segments, self.asks, strict=True) if asks for at in range(*segment)}

    @property
    def question(self) -> list[Span]:
        """The segments that ask with a question mark, or where none does those that ask."""
        flags = self.is_marked if any(self.is_marked) else self.asks
        return [segment for segment, asks in zip(self.segments, flags, strict=True) if asks]

    def reaching(self, first: int) -> Candidates:
        """The segments that reach the text from token `first` on, and those of a request that has other turns behind
        it; where there is none, every token of that text scores the prompt."""
        first = min(first, self.num_tokens - 1)
        at = [
            index
            for index, (segment, asks) in enumerate(zip(self.segments, self.asks, strict=True))
            if segment[1] > first or (asks if self.is_given else self.is_of_earlier_request(segment))
        ]
        num_repeated = sum(index < self.num_repeated for index in at)
        segments = tuple(self.segments[index] for index in at)
        borders = [first, *(start for start, _ in segments[num_repeated:])]
        return replace(
            self,
            segments=segments,
            asks=tuple(self.asks[index] for index in at),
            is_marked=tuple(self.is_marked[index] for index in at),
            is_question=tuple(self.is_question[index] for index in at),
            num_repeated=num_repeated,
            start=max(self.start, min(borders)),
        )

    def is_of_earlier_request(self, segment: Span) -> bool:
        """Whether a segment is of the last user message, and other turns are behind that."""
        return self.request[0] <= segment[0] < self.request[1] <= self.start

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
        asks = tuple(segment == (start, stop) for segment in segments)
        found = replace(self, segments=segments, num_repeated=len(before), is_given=True)
        return replace(found, asks=asks, is_marked=asks, is_question=asks)


def find_candidates(text: PromptText) -> Candidates:
    """Find the segments that may hold the question. Without pieces, segments are runs of tokens.

    The last user message asks, whatever calls and results are behind it; the newest plan of the assistant may ask too,
    and an earlier user message to which the last one refers. A tool's result asks only where no user does.
    """
    num_tokens, pieces = len(text), text.pieces
    turns = text.turns or [ChatTurn("user", span) for span in between(text.template, num_tokens)]
    # The last token opens the answer, and a turn of nothing else is the template's.
    turns = [turn for turn in turns if turn.span[0] < num_tokens - 1] or [ChatTurn("user", (0, num_tokens))]
    last = turns[-1]
    start = max(num_tokens - WINDOW, last.span[0])
    *earlier, request = [turn for turn in turns if turn.role == "user"] or [last]
    plans = [turn.span for turn in turns[:-1] if turn.role == "assistant"]
    near = [*(turn.span for turn in earlier[-1:]), *plans[-1:]]
    places = [end for span in near for end in _ends(*span)]
    begin, end = request.span
    if request == last:
        places.append((begin, min(begin + _LEAD, start)))
    else:
        places += [(begin, min(begin + _LEAD, end)), (max(begin + _LEAD, end - _LEAD), end)]
    if turns[0].span[0] > 0:
        # The end of the system message, with its template.
        places.append((max(0, turns[0].span[0] - _LEAD), turns[0].span[0]))
    borders = _borders(num_tokens, pieces)
    before = [segment for place in sorted(places) for segment in _cut(borders, *place)]
    in_place = [] if last.role == "tool" and request != last else _cut(borders, start, last.span[1])
    own = [segment for segment in (*before, *in_place) if begin <= segment[0] < end]
    system = [segment for segment in before if segment[1] <= turns[0].span[0]]
    before, in_place = _long_enough(before, own), _long_enough(in_place, own)
    segments = (*before, *in_place)
    marked = {segment for segment in (*system, *own) if _has_mark(pieces, segment)}
    asking = dict.fromkeys(marked, False) | _asking(own, begin, pieces, marked)
    plan = plans[-1] if plans and plans[-1][0] >= end else (0, 0)
    asks = tuple(segment in asking for segment in segments)
    is_marked = tuple(segment in marked for segment in segments)
    is_question = tuple(asking.get(segment, False) for segment in segments)
    found = Candidates(num_tokens, segments, asks, is_marked, is_question, len(before), start, request.span, plan)
    return found if text.question is None else found.asking(text.question)


def _long_enough(segments: list[Span], request: list[Span]) -> list[Span]:
    """The segments that are long enough for a question, and the request's last one; all of them where none is."""
    return [each for each in segments if each[1] - each[0] >= _FEWEST or each in request[-1:]] or segments


def _asking(request: list[Span], begin: int, pieces: Sequence[str] | None, marked: set[Span]) -> dict[Span, bool]:
    """The segments of a request that ask by their place, and whether each is a question at its end: up to _LEAD tokens
    of its last paragraph, or where it ends with a question mark the questions at its end; a short paragraph before
    that; and its first line, if that is a paragraph."""
    paragraphs: list[list[Span]] = [[]]
    for each in reversed(request):
        if paragraphs[-1] and _ends_paragraph(pieces, each[1]):
            paragraphs.append([])
        paragraphs[-1].append(each)
    near, before = paragraphs[0], [*paragraphs, []][1]
    asking: dict[Span, bool] = {}
    if request and request[0][0] == begin and _ends_paragraph(pieces, request[0][1]):
        asking[request[0]] = False
    for each in near:
        if each != near[0] and ((asking[near[0]] and each not in marked) or near[0][1] - each[0] > _LEAD):
            break
        asking[each] = each in marked
    if before and before[0][1] - before[-1][0] <= _LEAD // 2:
        asking = {each: each in marked for each in before} | asking
    return asking


def _ends_paragraph(pieces: Sequence[str] | None, stop: int) -> bool:
    """Whether a blank line is before a token."""
    return pieces is not None and "".join(pieces[max(0, stop - 2) : stop]).rstrip(" \t").count("\n") > 1


def _has_mark(pieces: Sequence[str] | None, segment: Span) -> bool:
    """Whether a segment ends with a question mark; linear in its length."""
    text = "" if pieces is None else "".join(pieces[slice(*segment)]).rstrip()
    # The mark, with up to two characters before it, is where the closing characters begin or among them.
    return _QUESTION_MARK.search(text, max(0, len(text.rstrip(_CLOSING)) - 3)) is not None


def _ends(start: int, stop: int) -> list[Span]:
    """The beginning and the end of an earlier turn, or all of a short one."""
    if stop - start <= _LEAD:
        return [(start, stop)]
    return [(start, start + _LEAD // 2), (stop - _LEAD // 2, stop)]


def question_tokens(found: Candidates) -> set[int]:
    """The question's tokens: those of the segments that ask, with a question mark if any does; and of the newest
    plan."""
    first, last = (0, 0) if found.is_given else found.plan
    plan = [segment for segment in found.segments if first <= segment[0] < last]
    return {at for segment in (*found.question, *plan) for at in range(*segment)}


def _borders(num_tokens: int, pieces: Sequence[str] | None) -> list[int]:
    return [*range(0, num_tokens, _LEAD // 2), num_tokens] if pieces is None else line_borders(pieces)


def _cut(borders: Sequence[int], start: int, stop: int) -> list[Span]:
    """The parts of a span between these borders."""
    parts = ((max(begin, start), min(end, stop)) for begin, end in pairwise(borders))
    return [(begin, end) for begin, end in parts if begin < end]
