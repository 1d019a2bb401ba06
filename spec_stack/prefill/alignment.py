"""Importance across tokenizers, by the characters that two tokenizations of one text share. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

Span = tuple[int, int]


def overlaps(target_spans: Sequence[Span], draft_spans: Sequence[Span]) -> list[Span]:
    """For every target token the half-open range of draft tokens that share a character with it.

    Spans are half-open character offsets, one per token; several tokens may share one character. The ranges' starts
    never decrease. A token without characters (start >= stop, as an added special token) gets an empty range; such a
    draft token is in a range only between two others. Raises ValueError where the draft's spans run backwards.
    """
    written = [index for index, (start, stop) in enumerate(draft_spans) if start < stop]
    starts = [draft_spans[index][0] for index in written]
    stops = [draft_spans[index][1] for index in written]
    if starts != sorted(starts) or stops != sorted(stops):
        raise ValueError("the draft's tokens do not follow the text; its offsets run backwards")
    ranges: list[Span] = []
    begin = written[0] if written else len(draft_spans)
    for start, stop in target_spans:
        first, last = bisect_right(stops, start), bisect_left(starts, stop)
        if start < stop and first < last:
            begin = max(begin, written[first])
            ranges.append((begin, written[last - 1] + 1))
        else:
            ranges.append((begin, begin))
    return ranges


def map_importance(importance: torch.Tensor, ranges: Sequence[Span]) -> torch.Tensor:
    """Target importance (len(ranges),) from draft importance (num_draft_tokens,): each range's maximum, 0 where
    empty.
    """
    values = importance.tolist()
    return importance.new_tensor([max(values[start:stop], default=0.0) for start, stop in ranges])
