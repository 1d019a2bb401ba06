"""Seconds of a decode step, and tokens per second, learned online with exponential forgetting.

Outliers (stalls) are pulled towards the expectation. Slopes shrink towards 0: one gamma alone does not identify them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from operator import mul
from typing import Generic, TypeVar

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


@lru_cache(maxsize=4096)
def length_scale(num_slots: float) -> int:
    """A context's length in powers of two; under 512 tokens it hardly affects a step's seconds."""
    return round(math.log2(max(num_slots, _SHORT_CONTEXT)))


class Allowance:
    """The plain steps that something may still lose: a start, a share of the time so far, and its own net gain.

    A step is tried only while some are left, so over any number of requests plain decoding is quicker by at most the
    share, the start and one step's loss. What is left has an upper bound, which ends a draft that has become bad, and a
    request begins with little of the gain of others.
    """

    def __init__(self, start: float = TUNING.start_allowance, share: float = TUNING.try_share) -> None:
        self.num_steps, self._share = start, share

    def begin_request(self) -> None:
        self.num_steps = min(self.num_steps, TUNING.carried_allowance)

    def add(self, num_tokens: float, num_plain_steps: float, is_used: bool) -> None:
        """Account for a step that took as long as so many plain ones. is_used: the tokens count as its gain."""
        gain = num_tokens - num_plain_steps if is_used else 0.0
        self.num_steps = min(self.num_steps + gain + self._share * num_plain_steps, TUNING.most_allowance)


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

    @property
    def value(self) -> float:
        tokens, time = self._shared
        shared = (tokens + self._start * TUNING.prior_weight) / (time + TUNING.prior_weight)
        tokens, time = self._own
        return (tokens + shared * TUNING.prior_weight) / (time + TUNING.prior_weight)


class DiscountedCurve:
    """y = base + Σ slope_k * max(x - knot_k, 0) over a discounted past.

    The knots increase. Ridge regression of the slopes by coordinate descent, warm-started. is_target: of a target's
    seconds by verified tokens. Its slopes are 0 or more, since products of a few rows take as long as those of one and
    many rows do not. Its base is the mean of y at 0, which lasts while every step drafts; until there is one, the least
    y stands for it.
    """

    def __init__(
        self, knots: Sequence[float] = TUNING.knots, shrinkage: float = TUNING.shrinkage, is_target: bool = True
    ) -> None:
        self._knots, self._shrinkage, self._is_target = knots, shrinkage, is_target
        self._least_slope = 0.0 if is_target else -math.inf
        self.base = 0.0
        self.num_plain = 0
        self._forget()

    def _forget(self) -> None:
        # Discounted sums of products of (1, max(x - knot, 0) for every knot, y).
        size = len(self._knots) + 2
        self._moments = [[0.0] * size for _ in range(size)]
        self._slopes = [0.0] * len(self._knots)

    @property
    def weight(self) -> float:
        """Observations, discounted; of a target those that verified something."""
        return self._moments[0][0]

    def at(self, x: float) -> float:
        y = self.base
        for slope, knot in zip(self._slopes, self._knots, strict=True):
            if x <= knot:
                break
            y += slope * (x - knot)
        return y

    def add(self, x: float, y: float) -> None:
        expected = self.at(x)
        if expected > 0:
            y = min(y, expected * TOLERANCE)
        if self._is_target:
            self._move_base(x, y)
            if x == 0:
                return
        row = [1.0, *(max(x - knot, 0.0) for knot in self._knots), y]
        self._moments = [
            [TUNING.keep * moment + value * other for moment, other in zip(moments, row, strict=True)]
            for moments, value in zip(self._moments, row, strict=True)
        ]
        self._settle()

    def _move_base(self, x: float, y: float) -> None:
        if x == 0:
            self.num_plain += 1
            self.base += (y - self.base) / min(self.num_plain, TUNING.recent_steps)
        elif not self.num_plain:
            self.base = min(self.base or y, y)
        elif self.base > y * TOLERANCE:
            # More tokens in far less time: the machine was slow when it took fewer, and what it measured then is void.
            self.base = y * TOLERANCE
            self._forget()

    def _settle(self) -> None:
        means = [moment / self.weight for moment in self._moments[0][1:]]
        # A knot that no step has passed has no slope.
        passed = [at for at, mean in enumerate(means[:-1]) if mean]
        slopes = self._slopes
        systems = []
        for at in passed:
            first, *products, with_y = self._moments[at + 1]
            if self._is_target:
                with_y -= self.base * first
            else:
                products = [product - first * mean for product, mean in zip(products, means, strict=False)]
                with_y -= first * means[-1]
            systems.append((at, products, with_y))
        for _ in range(_ROUNDS):
            for at, products, with_y in systems:
                others = sum(map(mul, products, slopes)) - products[at] * slopes[at]
                slope = (with_y - others) / (max(products[at], 0.0) + self._shrinkage)
                slopes[at] = max(slope, self._least_slope)
        if not self._is_target:
            self.base = means[-1] - sum(map(mul, slopes, means))


class StepCost:
    """Online estimate of a step's seconds: proportional to gamma for the draft, a curve for the target.

    A target with a recurrent state recomputes accepted tokens after a rejection: its curve is over all tokens of the
    forward, and a proposed token is charged its recent share of recomputing.
    """

    def __init__(self) -> None:
        # Per token, of the newest steps that drafted.
        self._drafted_s: deque[float] = deque(maxlen=TUNING.recent_steps)
        self._verify = DiscountedCurve()
        self._num_proposed = self._num_recomputed = 0.0
        self.num_steps = self.most_drafted = self.most_verified = 0

    @property
    def knows_plain(self) -> bool:
        return self._verify.num_plain > 0

    def draft_s(self, gamma: int) -> float:
        """Expected seconds of drafting gamma tokens, without catching up."""
        # The lower median of the newest steps and a guess, so that one stall is not believed, nor a slow first step.
        known = sorted([*self._drafted_s, TUNING.start_draft * self.plain_s])
        return gamma * known[(len(known) - 1) // 2]

    def verify_s(self, num_tokens: float) -> float:
        """Expected seconds of verifying so many proposed tokens."""
        return self._verify.at(num_tokens * self._with_recomputed)

    def verify_per_token_s(self, num_others: float = 0) -> float:
        """Seconds of one more token to verify beside `num_others` others."""
        return (self._verify.at(num_others + 1) - self._verify.at(num_others)) * self._with_recomputed

    def per_token_s(self, num_others: float = 0) -> float:
        """Seconds to draft and verify one more token beside `num_others` others."""
        return self.draft_s(1) + self.verify_per_token_s(num_others)

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
        self.num_steps += 1
        self.most_verified = max(self.most_verified, gamma + num_ngram_tokens)
        self._num_proposed = self._num_proposed * TUNING.keep + gamma + num_ngram_tokens
        self._num_recomputed = self._num_recomputed * TUNING.keep + num_recomputed
        if gamma:
            self._drafted_s.append(draft_s / gamma)
            self.most_drafted = max(self.most_drafted, gamma)
        self._verify.add(gamma + num_ngram_tokens + num_recomputed, verify_s)


class StepTimes:
    """Seconds of a pair's steps by context length, and of what the draft has to catch up on before one.

    Its readers show it every record; each is learned once.
    """

    def __init__(self) -> None:
        self._costs = PerContextLength(StepCost)
        self._newest: StepRecord | None = None
        # The target's last prefill: seconds and tokens. The draft's catching up, per token, once it was seen.
        self._prefill = (0.0, 0)
        self._caught_up_s: float | None = None

    def at(self, step: StepContext | StepRecord) -> StepCost:
        """The costs at a step's context length."""
        return self._costs.at(step)

    def catching_up_s(self, draft_lag: int) -> float:
        """Expected seconds until a draft that lags by so many tokens can draft; 0 where it is a few."""
        if draft_lag <= TUNING.long_lag:
            return 0.0
        if self._caught_up_s is not None:
            return self._caught_up_s * draft_lag
        seconds, num_tokens = self._prefill
        return TUNING.start_draft * seconds * (min(draft_lag / num_tokens, 1.0) if num_tokens else 1.0)

    def drafting_s(self, record: StepRecord) -> float:
        """The step's draft_s without catching up on a few tokens."""
        return max(record.draft_s - (self._caught_up_s or 0.0) * max(record.draft_lag - USUAL_UNREAD, 0), 0.0)

    def observe(self, record: StepRecord) -> StepCost:
        """Learn from a record that is new; the costs at its context length."""
        cost = self.at(record)
        if record is self._newest:
            return cost
        self._newest = record
        if record.is_prefill:
            self._prefill = (record.verify_s if math.isfinite(record.verify_s) else 0.0), record.num_prefilled
        elif math.isfinite(record.seconds):
            self._observe_step(record, cost)
        return cost

    def _observe_step(self, record: StepRecord, cost: StepCost) -> None:
        if record.draft_lag > TUNING.long_lag and cost.knows_plain:
            seconds = max(record.draft_s - cost.draft_s(record.num_drafted), 0.0) / record.draft_lag
            known = seconds if self._caught_up_s is None else self._caught_up_s
            self._caught_up_s = known + 0.3 * (seconds - known)
        elif record.draft_lag <= TUNING.long_lag and not record.draft_prefilled_prompt:
            draft_s = self.drafting_s(record)
            cost.observe(record.num_drafted, draft_s, record.verify_s, record.num_recomputed, record.num_ngram_tokens)
