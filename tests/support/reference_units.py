"""Lines and sentences, and what is kept of them, character by character and unit by unit. Nothing of the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def borders(pieces: Sequence[str], longest: int) -> list[int]:
    """Where units begin and end, as token indices: after a run of stops with the breaks behind it, after breaks."""
    text = "".join(pieces)
    starts = [len("".join(pieces[:index])) for index in range(len(pieces))]
    ends, at = [], 0
    while at < len(text):
        if text[at] in ".!?。！？\n":
            while at < len(text) and text[at] in ".!?。！？\n":
                at += 1
        else:
            while at < len(text) and text[at] not in ".!?。！？\n":
                at += 1
            while at < len(text) and text[at] in ".!?。！？":
                at += 1
            while at < len(text) and text[at] == "\n":
                at += 1
        ends.append(at)
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
    """Whole lines by their mean score within the budget; the ends count into it, what is protected does not."""
    num_tokens, edges = len(pieces), borders(pieces, longest)
    kept = [at < first or at >= num_tokens - last for at in range(num_tokens)]
    free = [any(start <= at < stop for start, stop in protected) for at in range(num_tokens)]
    left = math.ceil(round(keep_rate * num_tokens, 9)) - sum(kept)
    units = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    for unit in sorted(units, key=lambda unit: (-sum(scores[at] for at in unit) / len(unit), unit.start)):
        new = [at for at in unit if not kept[at] and not free[at]]
        if new and len(new) <= left:
            left -= len(new)
            for at in unit:
                kept[at] = True
    return [at for at in range(num_tokens) if kept[at] or free[at]]
