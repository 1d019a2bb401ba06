"""Importance across tokenizers, by the characters that two tokenizations of one text share. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

Span = tuple[int, int]


def overlaps(target_spans: Sequence[Span], draft_spans: Sequence[Span]) -> list[Span]:
    """For every target token the half-open range of draft tokens that share a character with it.

    Spans are half-open character offsets into one text; several tokens may stand for one character (pieces of a
    byte-level one). A token without characters (start >= stop: a special token that the tokenizer added) shares none:
    a target token gets an empty range, a draft token is in a range only where it stands between two that are. The
    ranges' starts never decrease. Raises ValueError where the draft's spans run backwards.
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
    """Importance (len(ranges),) of the target's tokens from that of the draft's (num_draft_tokens,), which is not
    negative: each takes the largest of its range, and 0 where that is empty."""
    device = importance.device
    starts = torch.tensor([start for start, _ in ranges], dtype=torch.long, device=device)
    counts = torch.tensor([stop - start for start, stop in ranges], dtype=torch.long, device=device)
    owners = torch.repeat_interleave(torch.arange(len(ranges), device=device), counts)
    # Within a range the draft tokens are counted from its start; before it stand the counts of the earlier ranges.
    within = torch.arange(len(owners), device=device) - (counts.cumsum(0) - counts)[owners]
    mapped = torch.zeros(len(ranges), dtype=importance.dtype, device=device)
    return mapped.scatter_reduce_(0, owners, importance[starts[owners] + within], reduce="amax")
