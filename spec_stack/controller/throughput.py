"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceEstimator
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.step_cost import TOLERANCE, USUAL_UNREAD, Allowance, PerContextLength, RequestRate, StepCost
from spec_stack.controller.tuning import TUNING


@dataclass
class _Measured:
    """The measurements at one precision and length of the context. Rates are in tokens per plain step.

    achieved: of steps without n-gram tokens. with_draft: of achieved, from a request's first drafted token on, by whole
    answers. copied: share of the tokens from n-gram lookup. missed_s: seconds that drafting would have saved in this
    request's plain steps. prefill_s: seconds per token of the draft's catching up.
    """

    cost: StepCost = field(default_factory=StepCost)
    allowance: Allowance = field(default_factory=Allowance)
    achieved: RequestRate = field(default_factory=lambda: RequestRate(1.0))
    with_draft: RequestRate = field(default_factory=lambda: RequestRate(TUNING.start_speedup, keep=TUNING.forgetting))
    copied: RequestRate = field(default_factory=lambda: RequestRate(0.0))
    missed_s: float = 0.0
    prefill_s: float | None = None
    has_drafted: bool = False

    def begin_request(self) -> None:
        for rate in (self.achieved, self.with_draft, self.copied):
            rate.begin_request()
        self.allowance.begin_request()
        self.missed_s, self.has_drafted = 0.0, False

    def observe_prefill(self, record: StepRecord) -> None:
        """Learn the draft's seconds for catching up on many tokens."""
        seconds = max(record.draft_s - self.cost.draft_s(record.num_drafted), 0.0) / record.draft_lag
        self.prefill_s = seconds if self.prefill_s is None else self.prefill_s + 0.3 * (seconds - self.prefill_s)
        self.has_drafted = True

    def observe(self, record: StepRecord) -> None:
        """Learn from the times of a decode step."""
        self.copied.add(record.num_accepted - record.num_drafted_accepted, record.num_tokens)
        if record.gamma == 0:
            self.missed_s += record.seconds * max(1 - 1 / self.with_draft.value, 0.0)
        caught_up_s = (self.prefill_s or 0.0) * max(record.draft_lag - USUAL_UNREAD, 0)
        draft_s = max(record.draft_s - caught_up_s, 0.0)
        self.cost.observe(record.num_drafted, draft_s, record.verify_s, record.num_recomputed, record.num_ngram_tokens)
        if self.cost.knows_plain:
            self._rate(record)

    def _rate(self, step: StepRecord) -> None:
        """Rate a step as if nothing had been looked up in it; a stall does not lower the achieved rate."""
        if step.num_ngram_tokens and not step.num_drafted:
            self.allowance.add(0, step.seconds / self.cost.plain_s, False)
            return
        looked_up_s = self.cost.verify_s(step.gamma) - self.cost.verify_s(step.num_drafted)
        bound = TOLERANCE * self.cost.seconds(step.num_drafted)
        num_plain_steps = min(max(step.seconds - looked_up_s, 0.0), bound) / self.cost.plain_s
        num_tokens = step.num_drafted_accepted + 1
        self.allowance.add(num_tokens, num_plain_steps, step.num_drafted > 0)
        self.achieved.add(num_tokens, num_plain_steps)
        self.has_drafted |= step.num_drafted > 0
        if self.has_drafted:
            self.with_draft.add(num_tokens, num_plain_steps)


class _AnswerLength:
    """Moving average of answer lengths, since max_tokens is only a bound; with the length of the current answer."""

    def __init__(self) -> None:
        self._typical = float(TUNING.answer_tokens)
        self.num_tokens = 0

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill:
            if self.num_tokens:
                self._typical += 0.2 * (self.num_tokens - self._typical)
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
    where drafting gains much. A draft that is many tokens behind, as after a dense prefill, drafts only where the
    answer's expected saving exceeds the cost of catching up, which the allowance does not bound. Where much has been
    copied lately, it waits until the plain steps have cost that share of the catching up. Answer lengths are learned,
    since max_tokens is only a bound.

    Parameters
    ----------
    max_gamma : int
        Most tokens per step.
    acceptance : AcceptanceEstimator
        Gives the probability; the default is trained, and recalibrated online.
    """

    max_gamma: int = MAX_GAMMA
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator, repr=False)
    _measured: PerContextLength[_Measured] = field(init=False, repr=False)
    _answers: _AnswerLength = field(init=False, repr=False, default_factory=_AnswerLength)
    # The last prefill's seconds, and its number of tokens.
    _prefill: tuple[float, int] = field(init=False, repr=False, default=(0.0, 0))
    _num_since_plain: int = field(init=False, repr=False, default=0)
    # Whether the draft catches up because the answer is expected to save more, not as a trial.
    _invests: bool = field(init=False, repr=False, default=False)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        self._measured = PerContextLength(_Measured, self._renewed)

    def _renewed(self, known: _Measured) -> _Measured:
        """A start at a length far from all known: the rates stay, the costs are measured anew."""
        return replace(deepcopy(known), cost=StepCost(), allowance=Allowance(), missed_s=0.0)

    def threshold(self, context: StepContext, num_drafted: int = 0) -> float:
        """The probability below which a token beside so many others does not pay."""
        state = self._measured.at(context)
        return state.achieved.value * state.cost.per_token_s(num_drafted) / state.cost.plain_s

    def choose(self, context: StepContext) -> int:
        self.acceptance.reset()
        state = self._measured.at(context)
        if self._needs_plain(state):
            return 0
        prefill_s = self._prefill_s(context, state)
        self._invests = prefill_s > 0 and self._saves(context, state, prefill_s)
        if self._invests:
            return self._affordable(state)
        # Whole answers decide whether to prefill a prompt, not what the draft has gained lately.
        is_prompt = context.draft_lag > self._answers.num_tokens + TUNING.long_lag
        return 0 if prefill_s and is_prompt else self._affordable(state, prefill_s)

    def _needs_plain(self, state: _Measured) -> bool:
        """Return whether the seconds of a plain step are unknown, or have not been seen for long."""
        factor = 8 if state.achieved.value > TUNING.start_speedup else 1
        return not state.cost.knows_plain or self._num_since_plain >= factor * TUNING.plain_every

    def _affordable(self, state: _Measured, prefill_s: float = 0.0) -> int:
        """The most tokens that the allowance covers if all are rejected; at most twice as many as ever before.

        One is tried as soon as anything is left, whatever it costs.
        """
        cost = state.cost
        left_s = state.allowance.num_steps * cost.plain_s - prefill_s
        if left_s <= 0:
            return 0
        gamma = min(self.max_gamma, 2 * cost.most_drafted or 1)
        while gamma > 1 and cost.seconds(gamma) - cost.plain_s > left_s:
            gamma -= 1
        return gamma

    def _saves(self, context: StepContext, state: _Measured, prefill_s: float) -> bool:
        """Return whether the rest of the answer is expected to save more than catching up takes."""
        copied = state.copied.value
        saved_s = state.cost.plain_s * (1 - 1 / max(state.with_draft.value, 1.0))
        if state.missed_s + saved_s < copied * prefill_s:
            return False
        return self._answers.expected_left(context.max_gamma + 1) * (1 - copied) * saved_s > prefill_s

    def _prefill_s(self, context: StepContext, state: _Measured) -> float:
        """Expected seconds of the draft's catching up; 0 where it is a few tokens behind."""
        if context.draft_lag <= TUNING.long_lag:
            return 0.0
        if state.prefill_s is not None:
            return state.prefill_s * context.draft_lag
        seconds, num_tokens = self._prefill
        share = min(context.draft_lag / num_tokens, 1.0) if num_tokens else 1.0
        return TUNING.start_draft * seconds * share

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self.acceptance.update(signals)[1] > self.threshold(context, len(signals))

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; one with a prefill of either model updates acceptance, not times."""
        self.acceptance.learn(record)
        self._answers.observe(record)
        if record.is_prefill:
            self._prefill = (record.verify_s if math.isfinite(record.verify_s) else 0.0), record.num_prefilled
            for state in self._measured.values():
                state.begin_request()
            return
        if math.isfinite(record.seconds):
            self._observe_times(record)

    def _observe_times(self, record: StepRecord) -> None:
        state = self._measured.at(record)
        self._num_since_plain = self._num_since_plain + 1 if record.gamma else 0
        if not record.draft_prefilled_prompt and record.draft_lag <= TUNING.long_lag:
            state.observe(record)
        elif state.cost.knows_plain and record.draft_lag > TUNING.long_lag:
            state.observe_prefill(record)
            if not self._invests:
                state.allowance.add(record.num_tokens, record.seconds / state.cost.plain_s, True)
