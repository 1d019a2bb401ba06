"""Scores raised for rare words, slowly: every word of the question is looked for in every unit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def raised(
    worth: Sequence[float], pieces: Sequence[str], spans: Sequence[tuple[int, int]], asked: Mapping[int, float]
) -> list[float]:
    """The score of every unit. spans: its tokens. asked: the weights of the question's tokens."""
    shares = _shares(pieces, spans, asked)
    own = [each * (1 + 2 * share) for each, share in zip(worth, shares, strict=True)]
    scores = list(own)
    for above, (start, stop) in enumerate(spans):
        heading = "".join(pieces[start:stop]).strip()
        if shares[above] < 0.5 or not re.search(r"\A#|[:{\uff1a]\Z", heading):
            continue
        for below in range(above + 1, len(spans)):
            if spans[below][1] - stop <= 64:
                scores[below] = max(scores[below], 0.8 * own[above])
    return scores


def _shares(pieces: Sequence[str], spans: Sequence[tuple[int, int]], asked: Mapping[int, float]) -> list[float]:
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
            sums[at] += weight / len(holders)
    largest = max(sums)
    return [each / largest if largest else 0.0 for each in sums]


def _words(pieces: Sequence[str], tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Lower-case words, each with the token that holds its last character; some scripts have words of one character."""
    owners = [at for at in tokens for _ in pieces[at].lower()]
    text = "".join(pieces[at] for at in tokens).lower()
    alone = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    return [(found.group(), owners[found.end() - 1]) for found in re.finditer(f"[{alone}]|[^\\W{alone}]+", text)]
