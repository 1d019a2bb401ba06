"""Scores raised for rare words, slowly: every word of the question is looked for in every unit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence


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
