"""Means and ratios with their 95 % intervals, by drawing what was measured again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_DRAWS = 2000


def mean_interval(values: Sequence[float], groups: Sequence[str] | None = None, seed: int = 0) -> list[float]:
    """The mean of some values, with the ends of its interval. groups: drawn with all of their values."""
    keys = range(len(values)) if groups is None else groups
    number_of = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    group_of = [number_of[key] for key in keys]
    sums, counts = np.bincount(group_of, weights=np.array(values, dtype=float)), np.bincount(group_of)
    draws = _draws(len(sums), seed)
    drawn = sums[draws].sum(1) / counts[draws].sum(1)
    return [float(np.mean(values)), *map(float, np.percentile(drawn, [2.5, 97.5]))]


def ratio_interval(over: Sequence[float], under: Sequence[float], seed: int = 0) -> list[float]:
    """The ratio of two sums over the same prompts, in order, with the ends of its interval."""
    above, below = np.array(over, dtype=float), np.array(under, dtype=float)
    draws = _draws(len(above), seed)
    # A drawn sum of scores may be 0.
    ratios = above[draws].sum(1) / np.maximum(below[draws].sum(1), 1e-9)
    middle = above.sum() / max(below.sum(), 1e-9)
    return [float(middle), *map(float, np.percentile(ratios, [2.5, 97.5]))]


def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(NUM_DRAWS, count))
