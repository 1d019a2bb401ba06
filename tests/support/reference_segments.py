"""Lines and sentences, and what is kept of them, character by character and unit by unit. Nothing of the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

CLOSING = "\"'`*_)]}\u2019\u201d\u00bb\u300d\u300f\uff09"


def without_spaces(character: str) -> bool:
    """Scripts that put no space behind a stop, and the marks between words."""
    code = ord(character)
    return any(
        low <= code <= high for low, high in ((0x2010, 0x206F), (0x3000, 0x9FFF), (0xAC00, 0xD7AF), (0xFF00, 0xFFEF))
    )


def end_of_stops(text: str, at: int) -> int:
    """Where the stops at a place end, with what closes the sentence; the place itself where they end no sentence."""
    end = at
    while end < len(text) and text[end] in ".!?。！？":
        end += 1
    wide = any(stop in "。！？" for stop in text[at:end])
    while end < len(text) and text[end] in CLOSING:
        end += 1
    return end if wide or end == len(text) or text[end].isspace() or without_spaces(text[end]) else at


def borders(pieces: Sequence[str], longest: int) -> list[int]:
    """Where segments begin and end, as token indices: after stops that end a sentence with the breaks behind them,
    after breaks."""
    text = "".join(pieces)
    starts = [len("".join(pieces[:index])) for index in range(len(pieces))]
    ends, at = [], 0
    while at < len(text):
        end = end_of_stops(text, at) if text[at] in ".!?。！？" else at
        while end < len(text) and text[end] == "\n":
            end += 1
        if end > at:
            ends.append(end)
        elif text[at] in ".!?。！？":
            # None of this run ends anything.
            while end < len(text) and text[end] in ".!?。！？":
                end += 1
        at = max(end, at + 1)
    ends.append(len(text))
    found = [0]
    for end in [sum(start < end for start in starts) for end in ends] + [len(pieces)]:
        while end - found[-1] > longest:
            found.append(found[-1] + longest)
        if end > found[-1]:
            found.append(end)
    return found


def selected(
    scores: Sequence[float],
    pieces: Sequence[str],
    longest: int,
    keep_rate: float,
    first: int,
    last: int,
    protected: Sequence[tuple[int, int]],
) -> list[int]:
    """Whole lines by their mean score within the budget; the ends count into it, protected tokens nowhere.

    Tokens of the ends, which are kept anyway, carry no line.
    """
    num_tokens, edges = len(pieces), borders(pieces, longest)
    kept = [at < first or at >= num_tokens - last for at in range(num_tokens)]
    inside = [0.0 if forced else score for forced, score in zip(kept, scores, strict=True)]
    free = [any(start <= at < stop for start, stop in protected) for at in range(num_tokens)]
    num_paid = sum(end and not own for end, own in zip(kept, free, strict=True))
    left = math.ceil(round(keep_rate * num_tokens, 9)) - num_paid
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    for unit in sorted(segments, key=lambda unit: (-sum(inside[at] for at in unit) / len(unit), unit.start)):
        new = [at for at in unit if not kept[at] and not free[at]]
        if new and len(new) <= left:
            left -= len(new)
            for at in unit:
                kept[at] = True
    return [at for at in range(num_tokens) if kept[at] or free[at]]
