"""What a step costs, measured while it runs: seconds = base + per_token * gamma, for draft and verify apart.

A target with a recurrent state recomputes accepted tokens after a rejection. Its verify time is a line over all tokens
it takes in beside the last committed one, drafted and recomputed, and a drafted token is charged for the recomputing
that drafting has lately brought.

Two things make a plain regression wrong here. Steps stall now and then (a first kernel, another process), so a sample
far above the line is pulled towards it before it counts. And a policy that settles on one gamma leaves the slope
of the verify time unidentified, so both lines are shrunk: the draft's towards the origin, the target's
towards no slope. The past is forgotten exponentially, because caches grow and load changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class CostOptions:
    """How quickly the estimate follows.

    discount: weight of the past per step, in (0, 1); 0.98 remembers about 50 steps.
    warm_up: steps seen before an estimate is given; their median starts it, so one slow first step does no harm.
    tolerance: a sample over this factor above the line counts as if it were on that bound; none is too fast.
    shrinkage: weight of the prior slope, in squared tokens times steps.
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


class DiscountedLine:
    """y = base + slope * x by least squares over a discounted past, the slope shrunk towards `prior_slope`."""

    def __init__(self, discount: float, tolerance: float, shrinkage: float) -> None:
        self._discount = discount
        self._tolerance = tolerance
        self._shrinkage = shrinkage
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.base = 0.0
        self.slope = 0.0

    def age(self) -> None:
        """A step without a sample: what is known grows older all the same."""
        keep = self._discount
        self._weight, self._x, self._y = self._weight * keep, self._x * keep, self._y * keep
        self._xx, self._xy = self._xx * keep, self._xy * keep

    def add(self, x: float, y: float, prior_slope: float | None = None) -> None:
        """Take in one sample; one far above the line is moved to the edge of the tolerance first.

        prior_slope None takes the slope from the origin to the sample.
        """
        expected = self.base + self.slope * x
        if expected > 0:
            y = min(y, expected * self._tolerance)
        if prior_slope is None:
            prior_slope = y / x
        keep = self._discount
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(self._xx - self._weight * mean_x * mean_x, 0.0)
        covariance = self._xy - self._weight * mean_x * mean_y
        self.slope = max((covariance + self._shrinkage * prior_slope) / (spread + self._shrinkage), 0.0)
        self.base = mean_y - self.slope * mean_x
        if self.base < 0:
            # Through the origin then, or the slope would be too steep for all that was seen.
            self.base = 0.0
            self.slope = max((self._xy + self._shrinkage * prior_slope) / (self._xx + self._shrinkage), 0.0)


class StepCostModel:
    """Live estimate of a step's seconds. Mutated by `observe` alone, in about a microsecond."""

    def __init__(self, options: CostOptions | None = None) -> None:
        self.options = options or CostOptions()
        self._early: list[tuple[int, float, float, int]] = []
        self._draft = DiscountedLine(self.options.discount, self.options.tolerance, self.options.shrinkage)
        self._verify = DiscountedLine(self.options.discount, self.options.tolerance, self.options.shrinkage)
        self._drafted = False
        self._num_proposed = self._num_recomputed = 0.0

    @property
    def ready(self) -> bool:
        """Whether the warm-up is over and something has been drafted."""
        return self._drafted and len(self._early) >= self.options.warm_up

    @property
    def per_token_s(self) -> float:
        """Seconds that one more draft token costs: its draft forward, the marginal verify time, and what is recomputed
        for it."""
        return self._draft.slope + self._verify_slope

    @property
    def _verify_slope(self) -> float:
        recomputed = self._num_recomputed / self._num_proposed if self._num_proposed else 0.0
        return self._verify.slope * (1 + recomputed)

    @property
    def base_s(self) -> float:
        """Seconds of a step before any token is drafted."""
        return self._verify.base

    def seconds(self, gamma: int) -> float:
        """Expected seconds of a step that drafts gamma tokens."""
        draft_s = self._draft.base + self._draft.slope * gamma if gamma else 0.0
        return draft_s + self._verify.base + self._verify_slope * gamma

    def observe(self, gamma: int, draft_s: float, verify_s: float, num_recomputed: int = 0) -> None:
        """Take in one decode step, in which the target recomputed num_recomputed tokens. Prefill steps are not decode
        steps: do not pass them."""
        keep = self.options.discount
        self._num_proposed = self._num_proposed * keep + gamma
        self._num_recomputed = self._num_recomputed * keep + num_recomputed
        if len(self._early) < self.options.warm_up:
            self._early.append((gamma, draft_s, verify_s, num_recomputed))
            self._drafted = self._drafted or gamma > 0
            if len(self._early) == self.options.warm_up:
                self._start()
            return
        self._drafted = self._drafted or gamma > 0
        self._add(gamma, draft_s, verify_s, num_recomputed)

    def _start(self) -> None:
        """Take in the warm-up steps, each brought within the tolerance of their median."""
        per_token = [draft_s / gamma for gamma, draft_s, _, _ in self._early if gamma]
        typical_draft = median(per_token) if per_token else 0.0
        typical_verify = median(verify_s for _, _, verify_s, _ in self._early)
        bound = self.options.tolerance
        for gamma, draft_s, verify_s, num_recomputed in self._early:
            self._add(
                gamma,
                min(draft_s, bound * typical_draft * gamma),
                min(max(verify_s, typical_verify / bound), bound * typical_verify),
                num_recomputed,
            )

    def _add(self, gamma: int, draft_s: float, verify_s: float, num_recomputed: int) -> None:
        if gamma:
            # The draft's time is close to proportional, so the sample itself tells where an unidentified slope lies.
            self._draft.add(gamma, draft_s)
        else:
            self._draft.age()
        self._verify.add(gamma + num_recomputed, verify_s, prior_slope=0.0)


class DiscountedRate:
    """Tokens per second over a discounted past. Mutated by `add`."""

    def __init__(self, discount: float = 0.98) -> None:
        self._discount = discount
        self._num_tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_tokens = self._num_tokens * self._discount + num_tokens
        self._seconds = self._seconds * self._discount + seconds

    @property
    def tokens_per_s(self) -> float:
        """0.0 until a step that took time has been added."""
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0
