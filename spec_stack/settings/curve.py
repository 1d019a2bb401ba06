"""Keep rates: one for all prompt lengths, or a curve over lengths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from spec_stack.settings.checks import require, require_int, require_number

KeepCurve = Sequence[tuple[int, float]]
"""(num_tokens, keep_rate) pairs, linear in the logarithm of the length between them and level beyond."""


def require_keep_rate(keep_rate: object) -> None:
    """Require a rate in (0, 1], or a curve of rates over increasing lengths."""
    hint = f"got {keep_rate!r}; 1.0 is dense prefill"
    if not isinstance(keep_rate, tuple):
        require_number("keep_rate", keep_rate)
        require(0 < keep_rate <= 1, f"keep_rate must be in (0, 1], {hint}")  # type: ignore[operator]
        return
    pairs = bool(keep_rate) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in keep_rate)
    require(pairs, f"keep_rate must be a number or (num_tokens, keep_rate) pairs, {hint}")
    for num_tokens, rate in keep_rate:
        require_int("a length of the keep_rate curve", num_tokens, 1)
        require_number("a rate of the keep_rate curve", rate)
        require(0 < rate <= 1, f"every rate of the keep_rate curve must be in (0, 1], {hint}")
    lengths = [num_tokens for num_tokens, _ in keep_rate]
    require(lengths == sorted(set(lengths)), f"the lengths of the keep_rate curve must increase, got {lengths}")


def rate_at(keep_rate: float | KeepCurve, num_tokens: int) -> float:
    """The keep rate at this prompt length."""
    if not isinstance(keep_rate, Sequence):
        return keep_rate
    lengths, rates = zip(*keep_rate, strict=True)
    after = bisect_left(lengths, num_tokens)
    if after in (0, len(lengths)):
        return float(rates[min(after, len(rates) - 1)])
    low, high = lengths[after - 1], lengths[after]
    share = math.log(num_tokens / low) / math.log(high / low)
    return float(rates[after - 1] + share * (rates[after] - rates[after - 1]))
