"""The check of a pruned prompt by loops. Imports nothing from spec_stack."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def dropped_importance(
    importance: Sequence[float], seen: Collection[int], aside: Collection[int] = (), *, first: int = 0, last: int = 0
) -> float:
    """The share of the importance of a prompt's tokens that stands in those that are not seen.

    aside: tokens that do not count. first, last: neither do so many at the ends.
    """
    found = total = 0.0
    for at, value in enumerate(importance):
        if at < first or at >= len(importance) - last or at in aside:
            continue
        total += value
        if at not in seen:
            found += value
    return found / total if total else 1.0


def logprobs_divergence(whole: Sequence[float], part: Sequence[float]) -> float:
    """The Kullback-Leibler divergence of two lists of log-probabilities, in nats."""
    return sum(math.exp(one) * (one - other) for one, other in zip(whole, part, strict=True))
