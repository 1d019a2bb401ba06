"""Seconds of a decode step, and tokens per second, learned online with exponential forgetting.

Outliers (stalls) are pulled towards the expectation. Slopes shrink towards 0: one gamma alone does not identify them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from operator import mul
from statistics import median
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from spec_stack.controller.base import StepContext, StepRecord
from spec_stack.controller.tuning import TUNING

USUAL_UNREAD = 2
"""Tokens that the draft has to catch up on in a usual step: the last one drafted, and the target's own."""
TOLERANCE = TUNING.tolerance
SHORTEST_S = 1e-9
_SHORT_CONTEXT = 512
# Of coordinate descent, per observation.
_ROUNDS = 4

Known = TypeVar("Known")


class PerContextLength(Generic[Known]):
    """Estimates per precision, batch size and length, of the target's context and of the draft's, in powers of two.

    A size or length twice or half a known one starts from a copy of that estimate; elsewhere `renew` makes the start,
    so that steps many times as long are not taken for stalls.
    """

    def __init__(self, make: Callable[[], Known], renew: Callable[[Known], Known] | None = None) -> None:
        self._make = make
        self._renew = renew or (lambda known: make())
        self._known: dict[tuple[str, tuple[int, int, int]], Known] = {}

    def at(self, step: StepContext | StepRecord, batch_size: int = 1) -> Known:
        """The estimate for such a step, mutable."""
        lengths = length_scale(step.num_target_slots), length_scale(step.num_draft_slots)
        key = step.precision, (round(math.log2(batch_size)), *lengths)
        if key not in self._known:
            self._known[key] = self._start(key)
        return self._known[key]

    def _start(self, key: tuple[str, tuple[int, int, int]]) -> Known:
        precision, scales = key
        near = [
            (max(abs(one - other) for one, other in zip(scales, each[1], strict=True)), each)
            for each in self._known
            if each[0] == precision
        ]
        if not near:
            return self._make()
        distance, nearest = min(near)
        return (deepcopy if distance <= 1 else self._renew)(self._known[nearest])

    def values(self) -> list[Known]:
        return list(self._known.values())


def length_scale(num_slots: float) -> int:
    """A context's length in powers of two; under 512 tokens it hardly affects a step's seconds."""
    return round(math.log2(max(num_slots, _SHORT_CONTEXT)))


class RequestRate:
    """Tokens per unit of time over a discounted past.

    The time-weighted average of this request's rate, the rate of all requests and a prior, which counts for
    `TUNING.prior_weight` steps. `keep` discounts the past with every step.
    """

    def __init__(self, start: float, keep: float = TUNING.keep) -> None:
        self._start, self._keep = start, keep
        self._shared = self._own = (0.0, 0.0)

    def begin_request(self) -> None:
        """Forget the request; its share in the rate of all stays."""
        self._own = (0.0, 0.0)

    def add(self, num_tokens: float, time: float) -> None:
        self._shared, self._own = (
            (tokens * self._keep + num_tokens, seen * self._keep + time) for tokens, seen in (self._shared, self._own)
        )

    def fade(self, keep: float) -> None:
        """Discount the past by `keep`."""
        self._shared, self._own = ((tokens * keep, seen * keep) for tokens, seen in (self._shared, self._own))

    @property
    def value(self) -> float:
        tokens, time = self._shared
        shared = (tokens + self._start * TUNING.prior_weight) / (time + TUNING.prior_weight)
        tokens, time = self._own
        return (tokens + shared * TUNING.prior_weight) / (time + TUNING.prior_weight)


class DiscountedCurve:
    """y = base + Σ slope_k * max(x - knot_k, 0) over a discounted past.

    Ridge regression by coordinate descent, warm-started. is_convex: slopes of 0 or more, since a target's products of a
    few rows take as long as those of one and many rows do not.
    """

    def __init__(
        self,
        knots: Sequence[float] = TUNING.knots,
        shrinkage: float = TUNING.shrinkage,
        is_convex: bool = True,
    ) -> None:
        self._knots, self._shrinkage = knots, shrinkage
        self._least_slope = 0.0 if is_convex else -math.inf
        # Discounted sums of products of (1, max(x - knot, 0) for every knot, y).
        self._moments = np.zeros((len(knots) + 2, len(knots) + 2))
        self._slopes = [0.0] * len(knots)
        self.base = 0.0

    @property
    def weight(self) -> float:
        """Observations, discounted."""
        return float(self._moments[0, 0])

    def at(self, x: float) -> float:
        bends = zip(self._slopes, self._knots, strict=True)
        return self.base + sum(slope * (x - knot) for slope, knot in bends if x > knot)

    def add(self, x: float, y: float) -> None:
        expected = self.at(x)
        if expected > 0:
            y = min(y, expected * TOLERANCE)
        row = np.array([1.0, *(max(x - knot, 0.0) for knot in self._knots), y])
        self._moments = TUNING.keep * self._moments + np.outer(row, row)
        self._settle()

    def _settle(self) -> None:
        means = self._moments[0] / self.weight
        covariance = (self._moments - self.weight * np.outer(means, means))[1:-1, 1:].tolist()
        slopes = self._slopes
        for _ in range(_ROUNDS):
            for at, (*products, with_y) in enumerate(covariance):
                others = sum(map(mul, products, slopes)) - products[at] * slopes[at]
                slope = (with_y - others) / (max(products[at], 0.0) + self._shrinkage)
                slopes[at] = max(slope, self._least_slope)
        self.base = float(means[-1]) - sum(map(mul, slopes, means[1:-1].tolist()))


class _Sample(NamedTuple):
    gamma: int
    draft_s: float
    verify_s: float
    num_verified: int


class StepCost:
    """Online estimate of a step's seconds: proportional to gamma for the draft, a curve for the target.

    A target with a recurrent state recomputes accepted tokens after a rejection: its curve is over all tokens of the
    forward, and a proposed token is charged its recent share of recomputing.
    """

    def __init__(self) -> None:
        self._warm_up: list[_Sample] = []
        self._num_drafted = self._drafting_s = 0.0
        self._verify = DiscountedCurve()
        self._has_drafted = False
        self._num_proposed = self._num_recomputed = 0.0

    @property
    def ready(self) -> bool:
        """Return whether the warm-up is over and something has been drafted."""
        return self._has_drafted and self.ready_to_verify

    @property
    def ready_to_verify(self) -> bool:
        return len(self._warm_up) >= TUNING.warm_up

    def draft_s(self, gamma: int) -> float:
        """Expected seconds of drafting gamma tokens, without catching up."""
        return gamma * self._drafting_s / self._num_drafted if self._num_drafted else 0.0

    def verify_s(self, num_tokens: float) -> float:
        """Expected seconds of verifying so many proposed tokens."""
        return self._verify.at(num_tokens * self._with_recomputed)

    def verify_per_token_s(self, beside: float = 0) -> float:
        """Seconds of one more token to verify `beside` so many others."""
        return (self._verify.at(beside + 1) - self._verify.at(beside)) * self._with_recomputed

    def per_token_s(self, beside: float = 0) -> float:
        """Seconds to draft and verify one more token `beside` so many others."""
        return self.draft_s(1) + self.verify_per_token_s(beside)

    @property
    def _with_recomputed(self) -> float:
        """Tokens in the target's forward per proposed one."""
        return 1 + (self._num_recomputed / self._num_proposed if self._num_proposed else 0.0)

    @property
    def plain_s(self) -> float:
        """Seconds of a step without a proposal; never 0."""
        return max(self._verify.base, SHORTEST_S)

    def seconds(self, gamma: int, num_ngram_tokens: int = 0) -> float:
        """Expected seconds of a step with gamma drafted and num_ngram_tokens looked-up tokens."""
        return self.draft_s(gamma) + self.verify_s(gamma + num_ngram_tokens)

    def observe(
        self, gamma: int, draft_s: float, verify_s: float, num_recomputed: int = 0, num_ngram_tokens: int = 0
    ) -> None:
        """Learn from one decode step; do not pass prefill steps."""
        self._num_proposed = self._num_proposed * TUNING.keep + gamma + num_ngram_tokens
        self._num_recomputed = self._num_recomputed * TUNING.keep + num_recomputed
        self._has_drafted = self._has_drafted or gamma > 0
        step = _Sample(gamma, draft_s, verify_s, gamma + num_ngram_tokens + num_recomputed)
        if self.ready_to_verify:
            self._add(step)
            return
        self._warm_up.append(step)
        if self.ready_to_verify:
            for early in _calmed(self._warm_up):
                self._add(early)

    def _add(self, step: _Sample) -> None:
        draft_s = step.draft_s
        if self._num_drafted:
            draft_s = min(draft_s, TOLERANCE * self.draft_s(step.gamma))
        self._num_drafted = self._num_drafted * TUNING.draft_keep + step.gamma
        self._drafting_s = self._drafting_s * TUNING.draft_keep + draft_s
        self._verify.add(step.num_verified, step.verify_s)


def _calmed(steps: list[_Sample]) -> list[_Sample]:
    """The warm-up steps, each clipped to the tolerance around their median."""
    per_token = [step.draft_s / step.gamma for step in steps if step.gamma]
    typical_draft = median(per_token) if per_token else 0.0
    typical_verify = median(step.verify_s for step in steps)
    return [
        step._replace(
            draft_s=min(step.draft_s, TOLERANCE * typical_draft * step.gamma),
            verify_s=min(max(step.verify_s, typical_verify / TOLERANCE), TOLERANCE * typical_verify),
        )
        for step in steps
    ]
