"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceEstimator
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.step_times import TOLERANCE, Allowance, PerContextLength, RequestRate, StepCost, StepTimes
from spec_stack.controller.tuning import TUNING


@dataclass
class _DraftingGain:
    """What drafting brings at one precision and length of the context. Rates are in tokens per plain step.

    achieved: of steps without n-gram tokens. with_draft: of achieved, from a request's first drafted token on, by whole
    answers. copied: share of the tokens from n-gram lookup. missed: plain steps that drafting would have saved in this
    request's plain steps.
    """

    allowance: Allowance = field(default_factory=Allowance)
    achieved: RequestRate = field(default_factory=lambda: RequestRate(1.0))
    with_draft: RequestRate = field(default_factory=lambda: RequestRate(TUNING.untried_speedup, keep=TUNING.forgetting))
    copied: RequestRate = field(default_factory=lambda: RequestRate(0.0))
    missed: float = 0.0
    has_drafted: bool = False

    def begin_request(self) -> None:
        for rate in (self.achieved, self.with_draft, self.copied):
            rate.begin_request()
        self.allowance.begin_request()
        self.missed, self.has_drafted = 0.0, False

    def renewed(self) -> _DraftingGain:
        """A start at a length far from all known: the rates stay."""
        return replace(deepcopy(self), allowance=Allowance(), missed=0.0)

    def observe(self, record: StepRecord, cost: StepCost) -> tuple[float, float]:
        """Learn from a decode step; its tokens and plain steps, as if nothing had been looked up in it."""
        self.copied.add(record.num_accepted - record.num_drafted_accepted, record.num_tokens)
        if record.gamma == 0:
            self.missed += record.seconds / cost.plain_s * max(1 - 1 / self.with_draft.value, 0.0)
        if record.num_ngram_tokens and not record.num_drafted:
            num_plain_steps = record.seconds / cost.plain_s
            self.allowance.add(0, num_plain_steps, False)
            return num_plain_steps, num_plain_steps
        looked_up_s = cost.verify_s(record.gamma) - cost.verify_s(record.num_drafted)
        # A stall does not lower the achieved rate.
        bound = TOLERANCE * cost.seconds(record.num_drafted)
        num_plain_steps = min(max(record.seconds - looked_up_s, 0.0), bound) / cost.plain_s
        num_tokens = record.num_drafted_accepted + 1
        self.allowance.add(num_tokens, num_plain_steps, record.num_drafted > 0)
        self.achieved.add(num_tokens, num_plain_steps)
        self.has_drafted |= record.num_drafted > 0
        if self.has_drafted:
            self.with_draft.add(num_tokens, num_plain_steps)
        return num_tokens, num_plain_steps


class _AnswerLength:
    """Moving average of answer lengths, since max_tokens is only a bound; with the length of the current answer."""

    def __init__(self) -> None:
        self._typical, self._num_answers = float(TUNING.answer_tokens), 1
        self.num_tokens = 0

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            if self.num_tokens:
                self._num_answers += 1
                self._typical += max(0.2, 1 / self._num_answers) * (self.num_tokens - self._typical)
            self.num_tokens = 0
        self.num_tokens += record.num_tokens

    def expected_left(self, most: int) -> float:
        """Expected tokens to come; an answer longer than usual counts as half done."""
        return min(float(most), max(self._typical - self.num_tokens, float(self.num_tokens)))


@dataclass
class Throughput(Policy):
    """Go on drafting while P(all so far and the next are accepted) > tokens/s now achieved * seconds per draft token.

    A token that is accepted with probability P brings P tokens and costs b seconds, worth rate * b tokens at the
    present rate. At the optimum both are equal (Dinkelbach's condition for a ratio,
    https://doi.org/10.1287/mnsc.13.7.492), so the rule converges under the rate that it achieves. Precision enters
    through the measured costs alone. The rate is that of steps without a look-up, first over all requests, then over
    this one.

    A step drafts no more tokens than its `Allowance` covers if all are rejected, which bounds what drafting costs. The
    reference is measured: the first step at a far context length is plain, and then one in `TUNING.plain_every`, fewer
    where drafting gains much. A draft that has many tokens to run first (a prompt, or its kept part) drafts only where
    the answer's expected saving exceeds that cost. An allowance of its own pays for answers that ended before they had
    saved it. Where much has been copied lately, the draft waits until the plain steps have cost that share of the
    catching up. Answer lengths are learned, since max_tokens is only a bound.

    Parameters
    ----------
    max_gamma : int
        Most tokens per step.
    """

    max_gamma: int = MAX_GAMMA
    _acceptance: AcceptanceEstimator = field(init=False, repr=False, default_factory=AcceptanceEstimator)
    _times: StepTimes = field(init=False, repr=False, default_factory=StepTimes)
    _measured: PerContextLength[_DraftingGain] = field(init=False, repr=False)
    _answers: _AnswerLength = field(init=False, repr=False, default_factory=_AnswerLength)
    _num_since_plain: int = field(init=False, repr=False, default=0)
    # What catching up may lose; whether the draft catches up by it, and whether it did in this request.
    _catching_up: Allowance = field(init=False, repr=False)
    _invests: bool = field(init=False, repr=False, default=False)
    _has_invested: bool = field(init=False, repr=False, default=False)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        self._measured = PerContextLength(_DraftingGain, _DraftingGain.renewed)
        self._catching_up = Allowance(start=0.0, share=TUNING.catching_up_share)

    def use(self, times: StepTimes) -> None:
        self._times = times

    def threshold(self, context: StepContext, num_drafted: int = 0) -> float:
        """The probability below which a token beside so many others does not pay."""
        cost = self._times.at(context)
        return self._measured.at(context).achieved.value * cost.per_token_s(num_drafted) / cost.plain_s

    def choose(self, context: StepContext) -> int:
        self._acceptance.reset()
        self._invests = False
        state, cost = self._measured.at(context), self._times.at(context)
        if self._needs_plain(state, cost):
            return 0
        price = self._times.catching_up_s(context.draft_lag) / cost.plain_s
        if not price:
            return self._affordable(state, cost)
        saved = 1 - 1 / max(state.with_draft.value, 1.0)
        self._invests = self._catching_up.num_steps >= 0 and self._saves(context, state, price, saved)
        if self._invests:
            return self._affordable(state, cost)
        # A draft that gained too little, or did not pay in time, is tried again once that can be afforded.
        hoped = max(saved, 1 - 1 / TUNING.start_speedup)
        return self._affordable(state, cost, price) if self._saves(context, state, price, hoped) else 0

    def _needs_plain(self, state: _DraftingGain, cost: StepCost) -> bool:
        """Return whether the seconds of a plain step are unknown, or have not been seen for long."""
        factor = 8 if state.achieved.value > TUNING.start_speedup else 1
        return not cost.knows_plain or self._num_since_plain >= factor * TUNING.plain_every

    def _affordable(self, state: _DraftingGain, cost: StepCost, price: float = 0.0) -> int:
        """The most tokens that the allowance covers if all are rejected; at most twice as many as ever before.

        One is tried as soon as anything is left, whatever it costs.
        """
        left_s = (state.allowance.num_steps - price) * cost.plain_s
        if left_s <= 0:
            return 0
        gamma = min(self.max_gamma, 2 * cost.most_drafted or 1)
        while gamma > 1 and cost.seconds(gamma) - cost.plain_s > left_s:
            gamma -= 1
        return gamma

    def _saves(self, context: StepContext, state: _DraftingGain, price: float, saved: float) -> bool:
        """Return whether the rest of the answer is expected to save more than catching up takes, in plain steps.

        saved: by each token that is not copied.
        """
        copied = state.copied.value
        if state.missed + saved < copied * price:
            return False
        expected = self._answers.expected_left(context.max_gamma + 1) * (1 - copied) * saved
        return expected > TUNING.catching_up_margin * price

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self._acceptance.update(signals)[1] > self.threshold(context, len(signals))

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; one with a prefill of either model updates acceptance, not times."""
        self._acceptance.learn(record)
        self._answers.observe(record)
        cost = self._times.observe(record)
        if record.is_prefill:
            for state in self._measured.values():
                state.begin_request()
            self._catching_up.begin_request()
            self._has_invested = False
        elif math.isfinite(record.seconds):
            self._num_since_plain = self._num_since_plain + 1 if record.gamma else 0
            if cost.knows_plain:
                self._account(record, cost)

    def _account(self, record: StepRecord, cost: StepCost) -> None:
        """Account for what a step took and brought."""
        state = self._measured.at(record)
        if record.draft_lag > TUNING.long_lag:
            num_tokens, num_plain_steps = float(record.num_tokens), record.seconds / cost.plain_s
            state.has_drafted = True
            self._has_invested |= self._invests
            if not self._invests:
                state.allowance.add(num_tokens, num_plain_steps, True)
        elif record.draft_prefilled_prompt:
            return
        else:
            num_tokens, num_plain_steps = state.observe(record, cost)
        self._catching_up.add(num_tokens, num_plain_steps, self._has_invested)
