"""Intervals as lists, for JSON reports; a rank correlation with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from scipy.stats import rankdata

from spec_stack.bench import intervals


def mean_interval(values: Sequence[float], groups: Sequence[str] | None = None, seed: int = 0) -> list[float]:
    """The mean of some values, with the ends of its interval. groups: drawn with all of their values."""
    return [*astuple(intervals.mean_interval(values, groups, seed))]


def ratio_interval(over: Sequence[float], under: Sequence[float], seed: int = 0) -> list[float]:
    """The ratio of two sums over the same prompts, in order, with the ends of its interval."""
    return [*astuple(intervals.ratio_interval(over, under, seed))]


def rank_correlation(one: Sequence[float], other: Sequence[float], seed: int = 0) -> list[float]:
    """Spearman's correlation of two lists in the same order, with the ends of its interval; 0 where one is constant or
    empty."""
    if not len(one):
        return [0.0, 0.0, 0.0]
    pairs = np.array([one, other], dtype=float)
    drawn = [_spearman(pairs[:, draw]) for draw in intervals.draws(len(one), seed)]
    return [round(each, 3) for each in (_spearman(pairs), *map(float, np.percentile(drawn, [2.5, 97.5])))]


def _spearman(pairs: np.ndarray) -> float:
    ranks = rankdata(pairs, axis=1)
    return float(np.corrcoef(ranks)[0, 1]) if ranks.std(1).all() else 0.0
