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
    asking: Collection[int] = (),
) -> list[int]:
    """Whole segments by their mean score within the budget, each with its head and what that needs, up to most_heads;
    labels come with others alone. The ends count into the budget, protected tokens nowhere.

    The ends are the segments that lie within the first tokens and the last ones that are not protected, and those that
    ask and reach into the latter, with what they need; labels in front are none, and all from the last other segment on
    that is not protected are. Attention to the first and last tokens does not count.
    """
    num_tokens = edges[-1]
    outside = [at < first or at >= num_tokens - last for at in range(num_tokens)]
    inside = [0.0 if end else score for end, score in zip(outside, scores, strict=True)]
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    kept = [False] * num_tokens
    free = [any(start <= at < stop for start, stop in protected) for at in range(num_tokens)]
    texts = {*range(len(segments))} - {*labels} or {*range(len(segments))}
    last_paid = max((own for own in texts if not all(free[at] for at in segments[own])), default=len(segments) - 1)
    # The last tokens that are not protected, from the end on.
    behind, num_behind = num_tokens, 0
    while behind and num_behind < last and num_tokens - behind < 2 * last:
        behind -= 1
        num_behind += not free[behind]
    while behind < num_tokens and free[behind]:
        behind += 1
    for own in texts:
        reaches = segments[own].stop > behind and any(at in asking for at in segments[own])
        if segments[own].start >= behind or reaches:
            last_paid = min(last_paid, own)
    for own, segment in enumerate(segments):
        in_front = own in texts and segment.stop <= first
        if in_front or own >= last_paid:
            for each in _needed(own, heads, most_heads):
                for at in segments[each]:
                    kept[at] = True
    num_paid = sum(end and not own for end, own in zip(kept, free, strict=True))
    left = math.ceil(round(keep_rate * num_tokens, 9)) - num_paid
    ranked = sorted(
        range(len(segments)), key=lambda at: (-sum(inside[t] for t in segments[at]) / len(segments[at]), at)
    )
    for own in ranked:
        if own in labels or all(kept[at] or free[at] for at in segments[own]):
            continue
        new = {at for each in _needed(own, heads, most_heads) for at in segments[each] if not kept[at] and not free[at]}
        if len(new) <= left:
            left -= len(new)
            for at in new:
                kept[at] = True
    return [at for at in range(num_tokens) if kept[at] or free[at]]


def _needed(own: int, heads: Sequence[int], most_heads: int) -> list[int]:
    needed, at = [own], heads[own]
    while at >= 0 and at not in needed and len(needed) <= most_heads:
        needed.append(at)
        at = heads[at]
    return needed
