"""The question, token by token, and scores raised for its rare words: every word is looked for in every unit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """The segments of a prompt that may hold its question, and the tokens of the request."""

    pieces: Sequence[str]
    repeated: list[Span]
    in_place: list[Span]
    opening: int
    request: Sequence[int]
    is_last: bool

    @property
    def marked(self) -> list[bool]:
        return [_asks(self.pieces, span) for span in [*self.repeated, *self.in_place]]

    def since(self, first: int) -> Question:
        """The segments with a token of the text from `first` on, and the request where others are behind it."""

        def stays(span: Span) -> bool:
            return span[1] > first or (not self.is_last and span[0] in self.request)

        repeated, in_place = ([each for each in spans if stays(each)] for spans in (self.repeated, self.in_place))
        return replace(self, repeated=repeated, in_place=in_place)

    def words(self, half_life: int = 12, short: int = 32) -> dict[int, float]:
        """The weight of every token of the question."""
        spans = [*self.repeated, *self.in_place]
        own = [span for span in spans if span[0] in self.request]
        ends_so = bool(own) and _asks(self.pieces, own[-1])
        questions = [span for span in (own if ends_so else spans) if _asks(self.pieces, span)]
        weights = {at: 1.0 for span in questions for at in range(*span)}
        if own and not ends_so:
            begin, end = self.request[0], self.request[-1]
            for at in (at for span in own for at in range(*span)):
                is_first = own[0][0] == begin and at < own[0][1] <= begin + short
                weights[at] = 1.0 if is_first else weights.get(at, 2 ** ((at - end) / half_life))
        return weights


def question_of(
    pieces: Sequence[str],
    borders: Sequence[int],
    template: Sequence[Span] = (),
    roles: Sequence[str] = ("user",),
    window: int = 160,
    lead: int = 64,
    most_opening: tuple[int, int] = (8, 4),
) -> Question:
    """Look at every token: of whose turn it is, of which line, and how far from that turn's ends."""
    size = len(pieces)
    is_free = [not any(start <= at < stop for start, stop in template) for at in range(size)]
    spoken = [list(each) for free, each in groupby(range(size), is_free.__getitem__) if free]
    opening = min((size - 1 - spoken[-1][-1] if spoken else 0) or most_opening[1], most_opening[0], size)
    turns = [each for each in zip(roles, spoken, strict=True) if each[1][0] < size - opening]
    turns = turns or [("user", list(range(size)))]
    users = [turn for role, turn in turns if role == "user"] or [turns[-1][1]]
    last_role, last = turns[-1]
    system = turns[0][1][0]
    places = [list(range(max(0, system - lead), system))]
    near = [*users[-2:-1], *[turn for role, turn in turns[:-1] if role == "assistant"][-1:]]
    for turn in near:
        places += [turn] if len(turn) <= lead else [turn[: lead // 2], turn[-(lead // 2) :]]
    if users[-1] is last:
        places.append([at for at in last[:lead] if at < size - window])
    else:
        places += [users[-1][:lead], users[-1][lead:][-lead:]]
    is_result = last_role == "tool" and users[-1] is not last
    in_place = [] if is_result else [at for at in last if at >= size - window]
    ends = set(borders)
    repeated = _lines(pieces, ends, sorted(place for place in places if place))
    return Question(pieces, repeated, _lines(pieces, ends, [in_place]), opening, users[-1], users[-1] is last)


def _lines(pieces: Sequence[str], ends: set[int], places: Sequence[Sequence[int]]) -> list[Span]:
    """The lines of these tokens that are long enough to ask, or have a question mark; all where none is."""
    spans: list[list[int]] = []
    for place in places:
        for index, at in enumerate(place):
            if index == 0 or at in ends:
                spans.append([at, at])
            spans[-1][1] = at + 1
    lines = [(start, stop) for start, stop in spans]
    return [span for span in lines if span[1] - span[0] >= 4 or _asks(pieces, span)] or lines


def _asks(pieces: Sequence[str], span: Span) -> bool:
    """Whether a text ends with a question mark behind a word, whatever closes it."""
    text = "".join(pieces[slice(*span)]).rstrip()
    while text and text[-1] in "\"'`*_)]?!\u2019\u201d\u00bb\u300d\u300f\uff09" and not text.endswith("?"):
        text = text[:-1]
    if text.endswith(("\uff1f", "\u061f", "\u2e2e")):
        return True
    before = text.rstrip("?").removesuffix("\u00a0")
    return (
        text.endswith(("?", "\u037e"))
        and bool(before)
        and (before[-1].isalnum() or before[-1] in "_\"'`*\u2019\u201d\u00bb")
    )


def raised(
    worth: Sequence[float], pieces: Sequence[str], spans: Sequence[tuple[int, int]], asked: Mapping[int, float]
) -> list[float]:
    """The score of every unit. spans: its tokens. asked: the weights of the question's tokens."""
    sums = shared(pieces, spans, asked)
    largest = max(sums)
    own = [each * (1 + 2 * (share / largest if largest else 0)) for each, share in zip(worth, sums, strict=True)]
    scores = list(own)
    for above, below in _sections(sums, pieces, spans):
        for at in below:
            scores[at] = max(scores[at], 0.8 * own[above])
    return scores


def recalled(pieces: Sequence[str], spans: Sequence[tuple[int, int]], asked: Mapping[int, float]) -> list[float]:
    """What every unit of old text scores by words for recall."""
    sums = shared(pieces, spans, asked)
    scores = list(sums)
    for above, below in _sections(sums, pieces, spans):
        for at in [above, *below] if sums[above] >= 1 / 3 else []:
            scores[at] = max(scores[at], 1.0)
    return scores


def _sections(
    sums: Sequence[float], pieces: Sequence[str], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, list[int]]]:
    """Named headings with the units below them: up to 64 tokens, none behind a heading like it that is no deeper."""
    text, ends = "".join(pieces), [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    # From the line break on: a token may hold it with the next line's indentation.
    begins = [text.rfind("\n", 0, ends[start]) + 1 for start, _ in spans]
    lines = [text[begin : ends[stop]].rstrip() for begin, (_, stop) in zip(begins, spans, strict=True)]
    for above, line in enumerate(lines):
        if not max(sums) or sums[above] < 0.5 * max(sums) or not _is_heading(line):
            continue
        below = []
        for at in range(above + 1, len(spans)):
            if spans[at][1] - spans[above][1] > 64 or (_is_heading(lines[at]) and _closes(lines[at], line)):
                break
            below.append(at)
        yield above, below


def _is_heading(line: str) -> bool:
    return re.search(r"\A\s*#|[:{\uff1a]\s*\Z", line) is not None


def _closes(line: str, heading: str) -> bool:
    (space, marks), (own_space, own_marks) = (re.findall(r"\A(\s*)(#*)", each)[0] for each in (line, heading))
    if bool(marks) != bool(own_marks):
        return False
    return len(marks) <= len(own_marks) if marks else len(space) <= len(own_space)


def shared(pieces: Sequence[str], spans: Sequence[tuple[int, int]], asked: Mapping[int, float]) -> list[float]:
    """The sums of the rare words' weights, each over the root of the number of units that hold the word."""
    weights: dict[str, float] = {}
    for start in asked:
        if start - 1 not in asked:
            stop = start
            while stop in asked:
                stop += 1
            for word, token in _words(pieces, range(start, stop)):
                weights[word] = max(weights.get(word, 0.0), asked[token])
    bodies = [
        {word for word, _ in _words(pieces, [at for at in range(*span) if asked.get(at, 0.0) < 0.5])} for span in spans
    ]
    sums = [0.0] * len(spans)
    for word, weight in weights.items():
        holders = [at for at, body in enumerate(bodies) if word in body]
        for at in holders if len(holders) <= 6 else []:
            sums[at] += weight * (0.5 if _is_short(word) else 1) / len(holders) ** 0.5
    return sums


def _is_short(word: str) -> bool:
    """Whether a word has fewer than five letters, numbers and scripts without spaces apart."""
    return (
        1 <= len(word) <= 4
        and word.isalpha()
        and not re.match("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]", word)
    )


def _words(pieces: Sequence[str], tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Lower-case words, each with the token that holds its last character; some scripts have words of one character."""
    owners = [at for at in tokens for _ in pieces[at].lower()]
    text = "".join(pieces[at] for at in tokens).lower()
    alone = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    return [(found.group(), owners[found.end() - 1]) for found in re.finditer(f"[{alone}]|[^\\W{alone}]+", text)]
