"""Means and ratios with their 95 % intervals, by drawing what was measured again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

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


def rank_correlation(one: Sequence[float], other: Sequence[float], seed: int = 0) -> list[float]:
    """Spearman's correlation of two lists in the same order, with the ends of its interval; 0 where one is constant."""
    pairs = np.array([one, other], dtype=float)
    drawn = [_spearman(pairs[:, draw]) for draw in _draws(len(one), seed)]
    return [round(each, 3) for each in (_spearman(pairs), *map(float, np.percentile(drawn, [2.5, 97.5])))]


def _spearman(pairs: np.ndarray) -> float:
    ranks = rankdata(pairs, axis=1)
    return float(np.corrcoef(ranks)[0, 1]) if ranks.std(1).all() else 0.0


def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(NUM_DRAWS, count))
