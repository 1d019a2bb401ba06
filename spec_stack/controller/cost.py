"""Measure steps while they run: seconds = base + per_token * gamma, for draft and verify apart.

A target with a recurrent state recomputes accepted tokens after a rejection. Its verify time is a line over all tokens
it takes in beside the last committed one, drafted and recomputed, and a drafted token is charged for the recomputing
that drafting has lately brought.

What a verified token costs more depends on how many there are: products of a few rows take as long as those of one, and
many rows do not. So the target's seconds are a curve that bends upwards.

Two things make a plain regression wrong here. Steps stall now and then (a first kernel, another process), so a sample
far above the line is pulled towards it before it counts. And a policy that settles on one gamma leaves the slope
of the verify time unidentified, so both are shrunk: the draft's line towards the origin, the target's curve
towards no slope. The past is forgotten exponentially, because caches grow and load changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

_SHORTEST_S = 1e-9
KNOTS = (0.0, 4.0, 8.0, 16.0)
"""Verified tokens beside the last committed one at which the target's seconds may begin to rise faster."""
_ROUNDS = 4
USUAL_UNREAD = 2
"""Tokens that the draft has to catch up on in a usual step: the last one drafted, and the target's own."""


@dataclass(frozen=True)
class CostOptions:
    """How quickly the estimate follows.

    Parameters
    ----------
    discount : float
        Weight of the past per step, in (0, 1); 0.98 remembers about 50 steps.
    warm_up : int
        Steps seen before an estimate is given; their median starts it, so one slow first step does no harm.
    tolerance : float
        A sample over this factor above the line counts as if it were on that bound; none is too fast.
    shrinkage : float
        Weight of the prior slope, in squared tokens times steps.
    """

    discount: float = 0.98
    warm_up: int = 3
    tolerance: float = 2.0
    shrinkage: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1:
            raise ValueError(f"discount must be between 0 and 1, got {self.discount}; 0.98 remembers about 50 steps")
        if self.warm_up < 1:
            raise ValueError(f"warm_up must be 1 or more, got {self.warm_up}")
        if self.tolerance <= 1:
            raise ValueError(f"tolerance must be over 1, got {self.tolerance}; 2 lets steps take half to twice as long")
        if self.shrinkage <= 0:
            raise ValueError(f"shrinkage must be over 0, got {self.shrinkage}")


class Sums(NamedTuple):
    """Discounted sums over samples (x, y): all that a line needs."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def aged(self, keep: float) -> Sums:
        """The same, a step later."""
        return Sums(self.weight * keep, self.x * keep, self.y * keep, self.xx * keep, self.xy * keep)

    def aged_with(self, x: float, y: float, keep: float) -> Sums:
        """The same, a step later and with one sample more."""
        return Sums(
            self.weight * keep + 1,
            self.x * keep + x,
            self.y * keep + y,
            self.xx * keep + x * x,
            self.xy * keep + x * y,
        )


def fit(sums: Sums, prior_slope: float, shrinkage: float) -> tuple[float, float]:
    """The line y = base + slope * x through samples, its slope shrunk towards a prior.

    With s the shrinkage, p the prior slope, W the weight, and cov and var the discounted sums of (x - mean)(y - mean)
    and (x - mean)²::

        slope = max((cov + s p) / (var + s), 0)        base = mean_y - slope * mean_x

    which is least squares with s more samples' worth of evidence for p. Where that base is under zero, the line goes
    through the origin, or its slope would be too steep for all that was seen::

        slope = max((Σxy + s p) / (Σx² + s), 0)        base = 0

    Returns
    -------
    base, slope : float
    """
    mean_x, mean_y = sums.x / sums.weight, sums.y / sums.weight
    var = max(sums.xx - sums.weight * mean_x * mean_x, 0.0)
    cov = sums.xy - sums.weight * mean_x * mean_y
    slope = max((cov + shrinkage * prior_slope) / (var + shrinkage), 0.0)
    base = mean_y - slope * mean_x
    if base < 0:
        return 0.0, max((sums.xy + shrinkage * prior_slope) / (sums.xx + shrinkage), 0.0)
    return base, slope


class DiscountedLine:
    """y = base + slope * x over a discounted past. Mutated by `age` and `add`."""

    def __init__(self, discount: float, tolerance: float, shrinkage: float) -> None:
        self._discount = discount
        self._tolerance = tolerance
        self._shrinkage = shrinkage
        self._sums = Sums()
        self.base = 0.0
        self.slope = 0.0

    def age(self) -> None:
        """A step without a sample: what is known grows older all the same."""
        self._sums = self._sums.aged(self._discount)

    def add(self, x: float, y: float, prior_slope: float | None = None) -> None:
        """Take in one sample; one far above the line is moved to the edge of the tolerance first.

        prior_slope None takes the slope from the origin to the sample.
        """
        expected = self.base + self.slope * x
        if expected > 0:
            y = min(y, expected * self._tolerance)
        self._sums = self._sums.aged_with(x, y, self._discount)
        self.base, self.slope = fit(self._sums, y / x if prior_slope is None else prior_slope, self._shrinkage)


class DiscountedCurve:
    """y = base + Σ slope_k * max(x - knot_k, 0) with slopes of 0 or more, over a discounted past.

    Ridge regression with the slopes held at 0 or above, by descent along one slope after the other from where they
    were: with few knots, a few rounds settle it. Mutated by `add`.

    Parameters
    ----------
    discount, tolerance : float
        As in `CostOptions`.
    shrinkage : float
        What every slope is drawn towards 0 with, in squared tokens times steps.
    knots : sequence of float
        Where the curve may bend, rising from 0.
    """

    def __init__(self, discount: float, tolerance: float, shrinkage: float, knots: Sequence[float] = KNOTS) -> None:
        self._discount, self._tolerance, self._shrinkage = discount, tolerance, shrinkage
        self._knots = tuple(knots)
        size = len(self._knots)
        self._weight = self._sum_y = 0.0
        self._sum_x = [0.0] * size
        self._sum_xy = [0.0] * size
        self._sum_xx = [[0.0] * size for _ in range(size)]
        self._slopes = [0.0] * size
        self.base = 0.0

    def at(self, x: float) -> float:
        """The height of the curve."""
        return self.base + sum(
            slope * max(x - knot, 0.0) for slope, knot in zip(self._slopes, self._knots, strict=True)
        )

    def add(self, x: float, y: float) -> None:
        """Take in one sample; one far above the curve is moved to the edge of the tolerance first."""
        expected = self.at(x)
        if expected > 0:
            y = min(y, expected * self._tolerance)
        keep, size = self._discount, len(self._knots)
        bent = [max(x - knot, 0.0) for knot in self._knots]
        self._weight = self._weight * keep + 1
        self._sum_y = self._sum_y * keep + y
        for row in range(size):
            self._sum_x[row] = self._sum_x[row] * keep + bent[row]
            self._sum_xy[row] = self._sum_xy[row] * keep + bent[row] * y
            sums = self._sum_xx[row]
            for column in range(size):
                sums[column] = sums[column] * keep + bent[row] * bent[column]
        self._settle()

    def _settle(self) -> None:
        weight, size = self._weight, len(self._knots)
        means = [total / weight for total in self._sum_x]
        mean_y = self._sum_y / weight
        for _ in range(_ROUNDS):
            for row in range(size):
                left = self._sum_xy[row] - weight * means[row] * mean_y
                for column in range(size):
                    if column != row:
                        covariance = self._sum_xx[row][column] - weight * means[row] * means[column]
                        left -= covariance * self._slopes[column]
                variance = max(self._sum_xx[row][row] - weight * means[row] * means[row], 0.0)
                self._slopes[row] = max(left / (variance + self._shrinkage), 0.0)
        self.base = mean_y - sum(slope * mean for slope, mean in zip(self._slopes, means, strict=True))


class StepTimes(NamedTuple):
    """One decode step for the cost model: tokens drafted, seconds, tokens recomputed, tokens looked up."""

    gamma: int
    draft_s: float
    verify_s: float
    num_recomputed: int = 0
    num_looked_up: int = 0


class StepCostModel:
    """Live estimate of a step's seconds. Mutated by `observe` alone, in a few microseconds."""

    def __init__(self, options: CostOptions | None = None) -> None:
        self.options = options or CostOptions()
        self._warm_up: list[StepTimes] = []
        self._draft = DiscountedLine(self.options.discount, self.options.tolerance, self.options.shrinkage)
        self._verify = DiscountedCurve(self.options.discount, self.options.tolerance, self.options.shrinkage)
        self._has_drafted = False
        self._num_proposed = self._num_recomputed = 0.0

    @property
    def ready(self) -> bool:
        """Return whether the warm-up is over and something has been drafted."""
        return self._has_drafted and len(self._warm_up) >= self.options.warm_up

    @property
    def ready_to_verify(self) -> bool:
        """Return whether the warm-up is over, so that a verification's seconds are known."""
        return len(self._warm_up) >= self.options.warm_up

    def verify_per_token_s(self, beside: float = 0) -> float:
        """Seconds that one more token to verify costs `beside` so many others, what is recomputed for it included."""
        return (self._verify.at(beside + 1) - self._verify.at(beside)) * self._with_recomputed

    def draft_s(self, gamma: int) -> float:
        """Expected seconds of drafting gamma tokens, without what has to be caught up on."""
        return self._draft.base + self._draft.slope * gamma if gamma else 0.0

    def verify_s(self, num_tokens: int) -> float:
        """Expected seconds of verifying so many proposed tokens, what is recomputed for them included."""
        return self._verify.at(num_tokens * self._with_recomputed)

    def per_token_s(self, beside: float = 0) -> float:
        """Seconds that one more draft token costs `beside` so many others: its draft forward, the marginal verify time,
        and what is recomputed for it."""
        return self._draft.slope + self.verify_per_token_s(beside)

    @property
    def _with_recomputed(self) -> float:
        """Tokens that the target takes in per proposed one."""
        return 1 + (self._num_recomputed / self._num_proposed if self._num_proposed else 0.0)

    @property
    def base_s(self) -> float:
        """Seconds of a step before any token is drafted."""
        return self._verify.base

    @property
    def plain_s(self) -> float:
        """The same, never 0, to be divided by: a line through the origin has no base."""
        return max(self.base_s, _SHORTEST_S)

    def seconds(self, gamma: int, num_looked_up: int = 0) -> float:
        """Expected seconds of a step that drafts gamma tokens and has others looked up."""
        return self.draft_s(gamma) + self.verify_s(gamma + num_looked_up)

    def observe(
        self, gamma: int, draft_s: float, verify_s: float, num_recomputed: int = 0, num_looked_up: int = 0
    ) -> None:
        """Take in one decode step that drafted gamma tokens, in which the target verified num_looked_up more and
        recomputed num_recomputed. Prefill steps are not decode steps: do not pass them."""
        keep = self.options.discount
        self._num_proposed = self._num_proposed * keep + gamma + num_looked_up
        self._num_recomputed = self._num_recomputed * keep + num_recomputed
        self._has_drafted = self._has_drafted or gamma > 0
        step = StepTimes(gamma, draft_s, verify_s, num_recomputed, num_looked_up)
        if len(self._warm_up) >= self.options.warm_up:
            self._add(step)
            return
        self._warm_up.append(step)
        if len(self._warm_up) == self.options.warm_up:
            for early in _calmed(self._warm_up, self.options.tolerance):
                self._add(early)

    def _add(self, step: StepTimes) -> None:
        if step.gamma:
            # The draft's time is close to proportional, so the sample itself tells where an unidentified slope lies.
            self._draft.add(step.gamma, step.draft_s)
        else:
            self._draft.age()
        self._verify.add(step.gamma + step.num_looked_up + step.num_recomputed, step.verify_s)


def _calmed(steps: list[StepTimes], tolerance: float) -> list[StepTimes]:
    """The warm-up steps, each brought within the tolerance of their median."""
    per_token = [step.draft_s / step.gamma for step in steps if step.gamma]
    typical_draft = median(per_token) if per_token else 0.0
    typical_verify = median(step.verify_s for step in steps)
    return [
        step._replace(
            draft_s=min(step.draft_s, tolerance * typical_draft * step.gamma),
            verify_s=min(max(step.verify_s, typical_verify / tolerance), tolerance * typical_verify),
        )
        for step in steps
    ]


class DiscountedRate:
    """Tokens per second over a discounted past. Mutated by `add`."""

    def __init__(self, discount: float = 0.98) -> None:
        self._discount = discount
        self._num_tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_tokens = self._num_tokens * self._discount + num_tokens
        self._seconds = self._seconds * self._discount + seconds

    def fade(self, keep: float) -> None:
        """Let what is known weigh less against what comes; the rate stays."""
        self._num_tokens *= keep
        self._seconds *= keep

    @property
    def tokens_per_s(self) -> float:
        """0.0 until a step that took time has been added."""
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0
