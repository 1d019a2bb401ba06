"""Means and ratios over prompts with 95 % intervals, by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval, by bootstrap over prompts. `f"{interval:.2f}"` formats all three."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def mean_interval(values: Sequence[float], groups: Sequence[str] | None = None, seed: int = 0) -> Interval:
    """The mean of some values. groups: a value's group, drawn with all of its values."""
    keys = range(len(values)) if groups is None else groups
    number_of = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    group_of = [number_of[key] for key in keys]
    return _interval(np.bincount(group_of, weights=np.array(values, dtype=float)), np.bincount(group_of), seed)


def ratio_interval(over: Sequence[float], under: Sequence[float], seed: int = 0) -> Interval:
    """The ratio of two sums over the same prompts, in order."""
    return _interval(np.array(over, dtype=float), np.array(under, dtype=float), seed)


def draws(count: int, seed: int) -> NDArray[np.int64]:
    """(draws, count): the drawn numbers of each resample."""
    return np.random.default_rng(seed).integers(count, size=(_NUM_DRAWS, count))


def _interval(above: NDArray[Any], below: NDArray[Any], seed: int) -> Interval:
    drawn = draws(len(above), seed)
    # A drawn sum of scores may be 0.
    ratios = above[drawn].sum(1) / np.maximum(below[drawn].sum(1), 1e-9)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(above.sum() / max(below.sum(), 1e-9)), float(low), float(high))
