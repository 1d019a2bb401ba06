"""The question, token by token, and scores raised for its rare words: every word is looked for in every unit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """The segments of a prompt that may hold its question, and the tokens of the request and of the newest plan.
    marked: those that ask with a question mark. questions: those of them that count in full."""

    repeated: list[Span]
    in_place: list[Span]
    asking: set[Span]
    marked: set[Span]
    questions: set[Span]
    request: Sequence[int]
    plan: Sequence[int]
    is_last: bool

    @property
    def asks(self) -> list[bool]:
        return [span in self.asking for span in [*self.repeated, *self.in_place]]

    @property
    def is_marked(self) -> list[bool]:
        return [span in self.marked for span in [*self.repeated, *self.in_place]]

    @property
    def is_question(self) -> list[bool]:
        return [span in self.questions for span in [*self.repeated, *self.in_place]]

    def since(self, first: int) -> Question:
        """The segments with a token of the text from `first` on, and the request where others are behind it."""

        def stays(span: Span) -> bool:
            return span[1] > first or (not self.is_last and span[0] in self.request)

        repeated, in_place = ([each for each in spans if stays(each)] for spans in (self.repeated, self.in_place))
        return replace(self, repeated=repeated, in_place=in_place)

    def words(self) -> set[int]:
        """The tokens of the question."""
        spans = [*self.repeated, *self.in_place]
        asking = [span for span in spans if span in self.marked] or [span for span in spans if span in self.asking]
        asking += [span for span in spans if span[0] in self.plan]
        return {at for span in asking for at in range(*span)}


def question_of(
    pieces: Sequence[str],
    borders: Sequence[int],
    template: Sequence[Span] = (),
    roles: Sequence[str] = ("user",),
    window: int = 160,
    lead: int = 64,
    fewest: int = 4,
) -> Question:
    """Look at every token: of whose turn it is, of which line, and how far from that turn's ends."""
    size = len(pieces)
    is_free = [not any(start <= at < stop for start, stop in template) for at in range(size)]
    spoken = [list(each) for free, each in groupby(range(size), is_free.__getitem__) if free]
    turns = [each for each in zip(roles, spoken, strict=True) if each[1][0] < size - 1]
    turns = turns or [("user", list(range(size)))]
    users = [turn for role, turn in turns if role == "user"] or [turns[-1][1]]
    last_role, last = turns[-1]
    system = turns[0][1][0]
    places = [list(range(max(0, system - lead), system))]
    plans = [turn for role, turn in turns[:-1] if role == "assistant"][-1:]
    for turn in [*users[-2:-1], *plans]:
        places += [turn] if len(turn) <= lead else [turn[: lead // 2], turn[-(lead // 2) :]]
    if users[-1] is last:
        places.append([at for at in last[:lead] if at < size - window])
    else:
        places += [users[-1][:lead], users[-1][lead:][-lead:]]
    is_result = last_role == "tool" and users[-1] is not last
    in_place = [] if is_result else [at for at in last if at >= size - window]
    ends = set(borders)
    repeated, window_lines = _lines(ends, sorted(place for place in places if place)), _lines(ends, [in_place])
    own = [span for span in [*repeated, *window_lines] if span[0] in users[-1]]

    def long_enough(spans: list[Span]) -> list[Span]:
        return [each for each in spans if each[1] - each[0] >= fewest or (own and each == own[-1])] or spans

    plan = plans[0] if plans and plans[0][0] > users[-1][-1] else []
    asking, questions = _asking(pieces, own, users[-1][0], lead)
    asking |= {span for span in [*own, *repeated] if (span in own or span[1] <= system) and _asks(pieces, span)}
    repeated, window_lines = long_enough(repeated), long_enough(window_lines)
    marked = {span for span in asking if _asks(pieces, span)}
    return Question(repeated, window_lines, asking, marked, questions, users[-1], plan, users[-1] is last)


def _lines(ends: set[int], places: Sequence[Sequence[int]]) -> list[Span]:
    """The lines of these tokens."""
    spans: list[list[int]] = []
    for place in places:
        for index, at in enumerate(place):
            if index == 0 or at in ends:
                spans.append([at, at])
            spans[-1][1] = at + 1
    return [(start, stop) for start, stop in spans]


def _asking(pieces: Sequence[str], own: Sequence[Span], begin: int, most: int) -> tuple[set[Span], set[Span]]:
    """The lines of a request that end it, and its first one. A distance, a blank line, and another line before a
    question end what ends it; a short paragraph before it is not ended."""
    blanks = [at for at, (_, stop) in enumerate(own[:-1]) if _is_blank(pieces, stop)]
    paragraphs = [range(*ends) for ends in pairwise([0, *(at + 1 for at in blanks), len(own)])]
    near, before = set(paragraphs[-1]), set()
    if len(paragraphs) > 1 and own[paragraphs[-2][-1]][1] - own[paragraphs[-2][0]][0] <= most // 2:
        before = set(paragraphs[-2])
    asking: set[Span] = set()
    questions: set[Span] = set()
    for at, (start, stop) in enumerate(own):
        behind = own[at:]
        marks = [_asks(pieces, span) for span in behind]
        is_near = at in near and behind[-1][1] - start <= most and not (marks[-1] and not all(marks))
        is_near = is_near or at in before
        is_first = at == 0 and start == begin and _is_blank(pieces, stop)
        if is_near or is_first or len(behind) == 1:
            asking.add((start, stop))
        if marks[0] and (is_near or len(behind) == 1):
            questions.add((start, stop))
    return asking, questions


def _is_blank(pieces: Sequence[str], stop: int) -> bool:
    return re.search(r"\n[^\S\n]*\n[ \t]*\Z", "".join(pieces[max(0, stop - 2) : stop])) is not None


def _asks(pieces: Sequence[str], span: Span) -> bool:
    """Whether a line ends with a question mark behind a word or what closes one, and closing marks behind it."""
    text = "".join(pieces[slice(*span)]).rstrip().rstrip("\"'`*_)]\u2019\u201d\u00bb\u300d\u300f\uff09!")
    before = text.rstrip("?\u037e").removesuffix("\u00a0").removesuffix("\u202f")
    is_behind_word = bool(re.search("[\\w\"'\u2019\u201d\u00bb*`]\\Z", before))
    return text.endswith(("\uff1f", "\u061f", "\u2e2e")) or (text.endswith(("?", "\u037e")) and is_behind_word)


def raised(
    scores: Sequence[float],
    pieces: Sequence[str],
    spans: Sequence[tuple[int, int]],
    heads: Sequence[int],
    question_ids: Collection[int],
    most: float = 2,
) -> list[float]:
    """The score of every unit. spans: its tokens. heads: the unit that is kept with each, or -1.
    question_ids: the question's tokens."""
    sums = shared(pieces, spans, heads, question_ids)
    largest = max(sums)
    shares = [share / largest if largest else 0.0 for share in sums]
    own = [each * (1 + most * share) for each, share in zip(scores, shares, strict=True)]
    return [max(own[at], shares[head] * own[head]) if head >= 0 else own[at] for at, head in enumerate(heads)]


def shared(
    pieces: Sequence[str],
    spans: Sequence[tuple[int, int]],
    heads: Sequence[int],
    question_ids: Collection[int],
    fewest_letters: int = 5,
    short_word: float = 0.5,
    power: float = 1,
    most_units: float = math.inf,
) -> list[float]:
    """The sums of the rare words, each counted over a power of the number of units that hold the word, at most
    most_units; a head's words count for its units too."""
    question: set[str] = set()
    for start in question_ids:
        if start - 1 not in question_ids:
            stop = start
            while stop in question_ids:
                stop += 1
            question.update(word for word, _ in _words(pieces, range(start, stop)))
    words_by_unit = [
        {word for word, _ in _words(pieces, [at for at in range(*span) if at not in question_ids])} for span in spans
    ]
    sums = [0.0] * len(spans)
    for word in sorted(question):
        holders = [at for at, words in enumerate(words_by_unit) if word in words]
        own = short_word if _is_short(word, fewest_letters) else 1
        for at in range(len(spans)):
            above = at
            while above >= 0 and above not in holders:
                above = heads[above]
            if above >= 0:
                sums[at] += own / len(holders) ** power if len(holders) <= most_units else 0.0
    return sums


def _is_short(word: str, fewest: int) -> bool:
    """Whether a word has fewer letters, numbers and scripts without spaces apart."""
    return (
        1 <= len(word) < fewest
        and word.isalpha()
        and not re.match("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]", word)
    )


def _words(pieces: Sequence[str], tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Lower-case words, each with the token that holds its last character; some scripts have words of one character."""
    owners = [at for at in tokens for _ in pieces[at].lower()]
    text = "".join(pieces[at] for at in tokens).lower()
    alone = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    return [(found.group(), owners[found.end() - 1]) for found in re.finditer(f"[{alone}]|[^\\W{alone}]+", text)]
