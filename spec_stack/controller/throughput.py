"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field, replace

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceModel
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.cost import USUAL_UNREAD, CostOptions, StepCostModel
from spec_stack.controller.lengths import ByLength
from spec_stack.controller.rate import RequestRate
from spec_stack.controller.survival import Survival

_MAX_UNRATED = 64
# Tokens to catch up on from which the draft's prefill of them is weighed against what the answer can save.
_LONG_READ = 32
# What drafting has to gain over plain decoding to be used.
_LEAST_SPEEDUP = 1.02
# Where it gains less, one token is tried when that costs this share of the time since the last one.
_TRY_SHARE = 0.016
# Where drafting seems to bring less than this, one step in so many is plain: while all steps draft equally far, nothing
# tells what a plain one would take.
_CLEAR_SPEEDUP = 1.2
_CHECK_EVERY = 32
# What a draft nobody has tried is taken to bring, worth so many plain steps, and its prefill to take of the target's.
_START_SPEEDUP = 1.3
_START_WEIGHT = 6.0
# The same guess of what answers gain with a draft, all their steps together, and what is kept of it with every step:
# texts differ, so that an answer of a hundred tokens is no judge of the next.
_ANSWER_WEIGHT = 64.0
_ANSWER_KEEP = 0.998
# Tokens that the guess is worth that nothing is copied.
_NOT_COPIED = 100.0
# Plain steps' time of a request that count as much as all that was achieved before.
_SHARED_WEIGHT = 32.0
_TYPICAL_READ = 0.3
# Tokens of an answer, of which the first few are no judge.
_TYPICAL_ANSWER = 128.0
_FIRST_CAP = 1
# A step that takes longer than so many times what it should is a stall.
_MOST_NOISE = 1.5


def _unrated() -> deque[StepRecord]:
    return deque(maxlen=_MAX_UNRATED)


@dataclass
class _Measured:
    """The measurements at one precision and length of the context.

    achieved: of steps without a look-up. drafting: of those that drafted, by the draft's tokens alone. with_draft: of
    achieved, from a request's first drafted token on. All in tokens per plain step, of this request first. copied:
    share of the tokens that were looked up. missed_s: what drafting would have saved in this request's plain steps.
    idle_s: of steps since the draft was last measured. unrated: steps from before the costs are known, when there is no
    telling a stall from a step. read_s: seconds per token that the draft has to catch up on. has_drafted: in this
    request.
    """

    cost: StepCostModel
    achieved: RequestRate = field(default_factory=lambda: RequestRate(1.0, _START_WEIGHT, _SHARED_WEIGHT))
    drafting: RequestRate = field(default_factory=lambda: RequestRate(_START_SPEEDUP, _START_WEIGHT))
    with_draft: RequestRate = field(
        default_factory=lambda: RequestRate(_START_SPEEDUP, _ANSWER_WEIGHT, keep=_ANSWER_KEEP)
    )
    copied: RequestRate = field(default_factory=lambda: RequestRate(0.0, _NOT_COPIED))
    missed_s: float = 0.0
    idle_s: float = 0.0
    unrated: deque[StepRecord] = field(default_factory=_unrated)
    read_s: float | None = None
    has_drafted: bool = False

    def begin_request(self) -> None:
        """Make what the last request showed shared knowledge."""
        for rate in (self.achieved, self.drafting, self.with_draft, self.copied):
            rate.begin_request()
        self.missed_s, self.has_drafted = 0.0, False

    def observe_read(self, record: StepRecord) -> None:
        """Take in what it took the draft to catch up on many tokens."""
        seconds = max(record.draft_s - self.cost.draft_s(record.num_drafted), 0.0) / record.num_unread
        self.read_s = seconds if self.read_s is None else self.read_s + 0.3 * (seconds - self.read_s)
        self.has_drafted = True

    def observe(self, record: StepRecord) -> None:
        """Take in the times of a decode step."""
        self.copied.add(record.num_accepted - record.num_drafted_accepted, record.num_tokens)
        self.idle_s = 0.0 if record.num_drafted else self.idle_s + record.seconds
        if record.gamma == 0:
            self.missed_s += record.seconds * max(1 - 1 / self.drafting.value, 0.0)
        caught_up_s = (self.read_s or 0.0) * max(record.num_unread - USUAL_UNREAD, 0)
        draft_s = max(record.draft_s - caught_up_s, 0.0)
        self.cost.observe(record.num_drafted, draft_s, record.verify_s, record.num_recomputed, record.num_looked_up)
        self.unrated.append(record)
        if self.cost.ready:
            for step in self.unrated:
                self._rate(step, caught_up_s if step is record else 0.0)
            self.unrated.clear()

    def _rate(self, step: StepRecord, caught_up_s: float) -> None:
        """A step counts as if nothing had been looked up in it; one that does nothing else, not at all."""
        if step.num_looked_up and not step.num_drafted:
            return
        looked_up_s = self.cost.verify_s(step.gamma) - self.cost.verify_s(step.num_drafted)
        # A stall is no part of what is achieved, whatever caused it.
        bound = _MOST_NOISE * self.cost.seconds(step.num_drafted)
        num_plain_steps = min(max(step.seconds - caught_up_s - looked_up_s, 0.0), bound) / self.cost.plain_s
        num_tokens = step.num_drafted_accepted + 1
        self.achieved.add(num_tokens, num_plain_steps)
        self.has_drafted |= step.num_drafted > 0
        if self.has_drafted:
            self.with_draft.add(num_tokens, num_plain_steps)
        if step.num_drafted:
            self.drafting.add(num_tokens, num_plain_steps)
        else:
            # What is known of drafting grows old while nothing is drafted, so that a try that succeeds counts.
            self.drafting.fade()


class AnswerLength:
    """How long answers usually are, since max_tokens is but a bound, and this one is. Mutated by `observe`."""

    def __init__(self) -> None:
        self._typical = _TYPICAL_ANSWER
        self.num_tokens = 0

    def observe(self, record: StepRecord) -> None:
        """A prefill step ends the answer before it."""
        if record.is_prefill:
            if self.num_tokens:
                self._typical += 0.2 * (self.num_tokens - self._typical)
            self.num_tokens = 0
        self.num_tokens += record.num_tokens

    def expected_left(self, most: int) -> float:
        """Tokens that are probably still to come; an answer that is longer than usual is taken to be half done."""
        return min(float(most), max(self._typical - self.num_tokens, float(self.num_tokens)))


@dataclass
class Throughput(Policy):
    """Go on drafting while P(all so far and the next are accepted) > tokens/s now achieved * seconds per draft token.

    A token that is accepted with probability P brings P tokens and costs b seconds, which at the present rate
    would have brought rate * b tokens. At the optimum both are equal (Dinkelbach's condition for a ratio,
    https://doi.org/10.1287/mnsc.13.7.492), so following the rule with the rate it achieves itself leads there.
    Precision enters through the measured costs alone. The rate is that of steps without a look-up, in this request as
    far as it has shown any, before that in all.

    Nothing is drafted while steps that draft are expected to bring less than plain ones in the same time. That
    expectation is an average of what this request showed, what all did, and a start; what was seen weighs less with
    every step that drafts nothing, so a useless draft is tried again after a time that grows with what it has lost.
    A draft that is many tokens behind, as after a dense prefill, drafts only where what the answer can still save is
    more than catching up takes, by what whole answers gained with it; where much has been copied lately, it waits until
    the plain steps without it have cost that share of the catching up, since a text that look-ups write needs no draft.
    How long answers are is learned, since max_tokens is but a bound.

    Parameters
    ----------
    max_gamma : int
        Most tokens per step.
    cold_threshold : float
        Probability asked for while nothing has been measured yet.
    cost : CostOptions
        How quickly measured times are followed.
    acceptance : AcceptanceModel
        Gives the probability; the default is trained, and corrected online. The policy calls and mutates it.
    """

    max_gamma: int = MAX_GAMMA
    cold_threshold: float = 0.3
    cost: CostOptions = field(default_factory=CostOptions)
    acceptance: AcceptanceModel = field(default_factory=Survival, repr=False)
    _measured: ByLength[_Measured] = field(init=False, repr=False)
    _cap: int = field(init=False, repr=False, default=_FIRST_CAP)
    _answers: AnswerLength = field(init=False, repr=False, default_factory=AnswerLength)
    # The last prefill's seconds, and the tokens that the target took in.
    _prefill: tuple[float, int] = field(init=False, repr=False, default=(0.0, 0))
    _num_since_plain: int = field(init=False, repr=False, default=0)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.cold_threshold < 1:
            raise ValueError(f"cold_threshold is a probability between 0 and 1, got {self.cold_threshold}")
        self._measured = ByLength(lambda: _Measured(StepCostModel(self.cost)), deepcopy, self._renewed)

    def _renewed(self, known: _Measured) -> _Measured:
        """Make a start at a length far from all known: nobody knows what a step takes there, so it begins with
        little."""
        self._cap = _FIRST_CAP
        return replace(deepcopy(known), cost=StepCostModel(self.cost), idle_s=0.0, missed_s=0.0, unrated=_unrated())

    def threshold(self, context: StepContext, num_drafted: int = 0) -> float:
        """The probability below which a token beside so many others does not pay: tokens/s now achieved * its
        seconds."""
        state = self._measured.at(context)
        if not state.cost.ready:
            return self.cold_threshold
        return state.achieved.value * state.cost.per_token_s(num_drafted) / state.cost.plain_s

    def choose(self, context: StepContext) -> int:
        self.acceptance.begin()
        if not self._pays(context, self._measured.at(context)):
            return 0
        return min(self.max_gamma, self._cap)

    def _pays(self, context: StepContext, state: _Measured) -> bool:
        """Return whether drafting is expected to save time, in this step and with what it has to catch up on."""
        read_s = self._read_s(context, state)
        if not state.cost.ready_to_verify:
            return read_s == 0.0
        speedup = state.drafting.value
        # Whether to read a prompt is told by whole answers, not by the last tokens of another text.
        if speedup <= _LEAST_SPEEDUP and context.num_unread <= self._answers.num_tokens + _LONG_READ:
            self._num_since_plain = 0
            return self._may_try(state, read_s)
        self._num_since_plain += 1
        if state.cost.ready and speedup < _CLEAR_SPEEDUP and self._num_since_plain > _CHECK_EVERY:
            self._num_since_plain = 0
            return False
        return read_s == 0.0 or self._may_try(state, read_s) or self._saves(context, state, read_s)

    @staticmethod
    def _may_try(state: _Measured, read_s: float) -> bool:
        """Return whether so much time has gone by without the draft that one token of it may be tried."""
        return state.idle_s * _TRY_SHARE > state.cost.per_token_s() + read_s

    def _saves(self, context: StepContext, state: _Measured, read_s: float) -> bool:
        """Return whether what is left of the answer is expected to save more than catching up takes."""
        copied = state.copied.value
        saved_s = state.cost.base_s * (1 - 1 / max(state.with_draft.value, 1.0))
        if state.missed_s + saved_s < copied * read_s:
            return False
        left = self._answers.expected_left(context.max_gamma + 1) * (1 - copied)
        return left * saved_s > read_s

    def _read_s(self, context: StepContext, state: _Measured) -> float:
        """Seconds that catching up is expected to take the draft."""
        if context.num_unread <= _LONG_READ:
            return 0.0
        if state.read_s is not None:
            return state.read_s * context.num_unread
        seconds, num_tokens = self._prefill
        share = min(context.num_unread / num_tokens, 1.0) if num_tokens else 1.0
        return _TYPICAL_READ * seconds * share

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self.acceptance.extend(signals)[1] > self.threshold(context, len(signals))

    def chances(self, signals: DraftSignals) -> tuple[float, float]:
        return self.acceptance.extend(signals)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step. One with a prefill, of either model, teaches about acceptance, but not about times."""
        self.acceptance.learn(record)
        self._answers.observe(record)
        if record.is_prefill:
            self._prefill = (record.verify_s if math.isfinite(record.verify_s) else 0.0), record.num_prefilled
            for state in self._measured.values():
                state.begin_request()
            return
        if record.num_drafted and self._cap < self.max_gamma:
            # A draft that nobody knows begins with little, and has more while half of it is right.
            accepted = record.num_drafted_accepted
            self._cap = 2 * self._cap if 2 * accepted >= record.num_drafted else max(self._cap // 2, 1)
        if not math.isfinite(record.seconds):
            return
        has_read = record.draft_read_prompt or record.num_unread > _LONG_READ
        found = self._measured.at(record)
        if has_read and not found.cost.ready_to_verify:
            return
        if record.num_unread > _LONG_READ:
            found.observe_read(record)
        if not has_read:
            found.observe(record)
