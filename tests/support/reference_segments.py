"""What a budget keeps of segments, segment by segment. Nothing of the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence


def selected(
    scores: Sequence[float],
    edges: Sequence[int],
    heads: Sequence[int],
    labels: Collection[int],
    keep_rate: float,
    first: int,
    last: int,
    protected: Sequence[tuple[int, int]],
    most_heads: int = 32,
) -> list[int]:
    """Whole segments by their mean score within the budget, each with its head and what that needs, up to most_heads;
    labels come with others alone. The ends count into the budget, protected tokens nowhere.

    Tokens of the ends, which are kept anyway, carry no segment.
    """
    num_tokens = edges[-1]
    kept = [at < first or at >= num_tokens - last for at in range(num_tokens)]
    inside = [0.0 if forced else score for forced, score in zip(kept, scores, strict=True)]
    free = [any(start <= at < stop for start, stop in protected) for at in range(num_tokens)]
    num_paid = sum(end and not own for end, own in zip(kept, free, strict=True))
    left = math.ceil(round(keep_rate * num_tokens, 9)) - num_paid
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    ranked = sorted(
        range(len(segments)), key=lambda at: (-sum(inside[t] for t in segments[at]) / len(segments[at]), at)
    )
    for own in ranked:
        if own in labels or all(kept[at] or free[at] for at in segments[own]):
            continue
        needed, at = [own], heads[own]
        while at >= 0 and at not in needed and len(needed) <= most_heads:
            needed.append(at)
            at = heads[at]
        new = {at for each in needed for at in segments[each] if not kept[at] and not free[at]}
        if len(new) <= left:
            left -= len(new)
            for at in new:
                kept[at] = True
    return [at for at in range(num_tokens) if kept[at] or free[at]]
