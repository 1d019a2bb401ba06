"""Bounds of a share by counting (Clopper and Pearson), one-sided."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, comb, log, log1p

_STEPS = 60


def upper_bound(num: int, n: int, level: float = 0.95) -> float:
    """The largest share under which `num` of n or fewer are no rarer than 1 - level; 1 for n = 0."""
    return 1.0 if num >= n else _root(lambda share: _at_most(num, n, share) - (1 - level))


def lower_bound(num: int, n: int, level: float = 0.95) -> float:
    """The smallest share under which `num` of n or more are no rarer than 1 - level."""
    return 0.0 if num <= 0 else _root(lambda share: _at_most(num - 1, n, share) - level)


def num_needed(share: float) -> int:
    """How many cases without a loss bound the share of losses by `share`."""
    # The bound of n such cases is 1 - 0.05 ** (1 / n); rounding decides no whole number.
    return ceil(log(0.05) / log1p(-share) - 1e-9)


def _at_most(num: int, n: int, share: float) -> float:
    """The chance of num or fewer of n."""
    return sum(comb(n, at) * share**at * (1 - share) ** (n - at) for at in range(num + 1))


def _root(falling: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
