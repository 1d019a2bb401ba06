"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceModel, History, OnlineAcceptance
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.cost import CostOptions, DiscountedRate, StepCostModel
from spec_stack.controller.probing import Probing

_GAIN_WEIGHT = 0.1
_MAX_UNRATED = 64
# Tokens to catch up on from which the draft's reading of them is weighed against what the answer can save.
_LONG_READ = 32
# A draft forward over this share of a plain step cannot pay: all of 16 tokens right would gain a tenth.
_DEAREST_TOKEN = 0.9
_LEAST_SPEEDUP = 0.98
_MIN_DRAFTING_WEIGHT = 10.0
# Where drafting seems to bring less than this, one step in so many is plain: while all steps draft equally far, nothing
# tells what a plain one would take.
_CLEAR_SPEEDUP = 1.2
_CHECK_EVERY = 16
_IDLE_KEEP = 0.99
# What a draft nobody has tried is taken to save of a plain step's time, and its reading to take of the target's.
_TYPICAL_SAVING = 1 / 3
_TYPICAL_READ = 0.5
_FIRST_CAP = 1


@dataclass
class _PrecisionState:
    """What is measured at one precision.

    rate: the tokens/s now achieved. gain: what drafting has lately brought, in tokens a step.
    unrated: steps from before the costs are known, when there is no telling a stall from a step.
    drafting: the tokens/s of steps that drafted alone. read_s: seconds per token that the draft has to catch up on.
    """

    cost: StepCostModel
    rate: DiscountedRate = field(default_factory=DiscountedRate)
    gain: float = 0.0
    unrated: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_MAX_UNRATED))
    drafting: DiscountedRate = field(default_factory=lambda: DiscountedRate(0.97))
    drafting_weight: float = 0.0
    read_s: float | None = None

    def observe_read(self, record: StepRecord) -> None:
        """Take in what it took the draft to catch up on many tokens."""
        if record.num_unread > _LONG_READ:
            seconds = max(record.draft_s - self.cost.draft_s(record.num_drafted), 0.0) / record.num_unread
            self.read_s = seconds if self.read_s is None else self.read_s + 0.3 * (seconds - self.read_s)

    @property
    def speedup(self) -> float | None:
        """Of drafting steps over plain ones; None until there were enough."""
        if self.drafting_weight < _MIN_DRAFTING_WEIGHT or not self.cost.ready:
            return None
        return self.drafting.tokens_per_s * self.cost.base_s

    @property
    def can_pay(self) -> bool:
        """Whether drafting could be worth its time at all."""
        if self.cost.ready and self.cost.per_token_s > _DEAREST_TOKEN * self.cost.base_s:
            return False
        return self.speedup is None or self.speedup > _LEAST_SPEEDUP

    @property
    def is_doubtful(self) -> bool:
        """Whether drafting may not be worth its time, for all that is known."""
        return self.speedup is not None and self.speedup < _CLEAR_SPEEDUP

    def observe(self, record: StepRecord) -> None:
        """Take in the times of a decode step."""
        self.cost.observe(
            record.num_drafted, record.draft_s, record.verify_s, record.num_recomputed, record.num_looked_up
        )
        self.unrated.append(record)
        if self.cost.ready:
            for step in self.unrated:
                # A stall is no part of what is achieved, whatever caused it.
                bound = self.cost.options.tolerance * self.cost.seconds(step.num_drafted, step.num_looked_up)
                seconds = min(step.seconds, bound)
                self.rate.add(step.num_tokens, seconds)
                if step.num_drafted:
                    self.drafting_weight = self.drafting_weight * 0.97 + 1
                    self.drafting.add(step.num_drafted_accepted + 1, seconds)
                else:
                    # What drafting brought fades while nothing is drafted, so that better times are not held up by it.
                    self.drafting_weight *= _IDLE_KEEP
                    self.drafting.fade(_IDLE_KEEP)
            self.unrated.clear()


class AnswerLength:
    """How long answers usually are, since max_tokens is but a bound. Mutated by `observe`."""

    def __init__(self) -> None:
        self._typical: float | None = None
        self._num_tokens = 0

    def observe(self, record: StepRecord) -> None:
        """A prefill step ends the answer before it."""
        if record.is_prefill:
            if self._num_tokens:
                known = float(self._num_tokens) if self._typical is None else self._typical
                self._typical = known + 0.2 * (self._num_tokens - known)
            self._num_tokens = 0
        self._num_tokens += record.num_tokens

    def expected_left(self, most: int) -> float:
        """Tokens that are probably still to come; an answer that is longer than usual is taken to be half done."""
        if self._typical is None:
            return float(most)
        return min(float(most), max(self._typical - self._num_tokens, float(self._num_tokens)))


@dataclass
class Throughput(Policy):
    """Go on drafting while P(all so far and the next are accepted) > tokens/s now achieved * seconds per draft token.

    A token that is accepted with probability P brings P tokens and costs b seconds, which at the present rate
    would have brought rate * b tokens. At the optimum both are equal (Dinkelbach's condition for a ratio,
    https://doi.org/10.1287/mnsc.13.7.492), so following the rule with the rate it achieves itself leads there.
    Precision enters through the measured costs alone.

    The first token is worth more than its own chance, since its signals tell whether to go on. So drafting stops
    altogether only where that chance is too low and, besides, steps with drafting have lately lost time; or where
    one draft token takes nearly as long as a plain step, or drafting steps bring no more than plain ones.

    A draft that is many tokens behind, as after a dense prefill, drafts only where what the answer can still save is
    more than catching up takes. How long answers are is learned, since max_tokens is but a bound.

    Parameters
    ----------
    max_gamma : int
        Most tokens per step.
    cold_threshold : float
        Probability asked for while nothing has been measured yet.
    probe_every : int
        With drafting off, the idle steps before one drafts a token all the same, so that better times are noticed;
        twice as many after every probe that did not pay, up to sixteen times. A probe whose catching up would cost over
        2 % of the time since the last one waits; one that has to catch up is two steps, of which the second measures.
    cost : CostOptions
        How quickly measured times are followed.
    acceptance : AcceptanceModel
        Gives the probability; the default learns online, with no training at all. The policy calls and mutates it.
    """

    max_gamma: int = MAX_GAMMA
    cold_threshold: float = 0.3
    probe_every: int = 16
    cost: CostOptions = field(default_factory=CostOptions)
    acceptance: AcceptanceModel = field(default_factory=OnlineAcceptance, repr=False)
    _history: History = field(init=False, repr=False, default_factory=History)
    _states: dict[str, _PrecisionState] = field(init=False, repr=False, default_factory=dict)
    _threshold: float = field(init=False, repr=False)
    _probing: Probing = field(init=False, repr=False)
    _cap: int = field(init=False, repr=False, default=_FIRST_CAP)
    _answers: AnswerLength = field(init=False, repr=False, default_factory=AnswerLength)
    _prefill_s: float = field(init=False, repr=False, default=0.0)
    # What is known fades while nothing is drafted; that alone is no reason to draft again, a probe that was right is.
    _is_idle: bool = field(init=False, repr=False, default=False)
    _num_since_plain: int = field(init=False, repr=False, default=0)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.cold_threshold < 1:
            raise ValueError(f"cold_threshold is a probability between 0 and 1, got {self.cold_threshold}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")
        self._threshold = self.cold_threshold
        self._probing = Probing(self.probe_every, 16 * self.probe_every)

    def threshold(self, precision: str) -> float:
        """The probability below which a further token does not pay: tokens/s now achieved * seconds per draft token."""
        state = self._states.get(precision)
        if state is None or not state.cost.ready:
            return self.cold_threshold
        return state.rate.tokens_per_s * state.cost.per_token_s

    def choose(self, context: StepContext) -> int:
        self._probing.begin()
        self._threshold = self.threshold(context.precision)
        state = self._states.get(context.precision)
        first = self.acceptance.begin(self._history)
        read_s = self._read_s(context, state)
        is_worth = (first > self._threshold and not self._is_idle) or state is None or state.gain > 0
        if is_worth and (state is None or state.can_pay) and self._read_pays(context, state, read_s):
            if state is None or state.speedup is not None:
                # Not before it has shown that it pays: else a draft that just does not would be tried all the time.
                self._probing.reset()
            self._is_idle = False
            self._num_since_plain += 1
            if state is not None and state.is_doubtful and self._num_since_plain > _CHECK_EVERY:
                self._num_since_plain = 0
                return 0
            return min(self.max_gamma, self._cap)
        self._num_since_plain = 0
        self._is_idle = not is_worth
        if state is None or not state.cost.ready_to_verify:
            return 0
        return int(self._probing.is_due(read_s, state.cost.base_s, context.num_unread))

    def _read_s(self, context: StepContext, state: _PrecisionState | None) -> float:
        """Seconds that catching up is expected to take the draft."""
        if context.num_unread <= _LONG_READ:
            return 0.0
        if state is not None and state.read_s is not None:
            return state.read_s * context.num_unread
        return _TYPICAL_READ * self._prefill_s

    def _read_pays(self, context: StepContext, state: _PrecisionState | None, read_s: float) -> bool:
        """Whether the rest of the answer can save what the draft's catching up costs."""
        if read_s == 0.0:
            return True
        if state is None or not state.cost.ready_to_verify:
            return False
        speedup = state.speedup
        share = _TYPICAL_SAVING if speedup is None else 1 - 1 / max(speedup, 1.0)
        return self._answers.expected_left(context.max_gamma + 1) * share * state.cost.base_s > read_s

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self.acceptance.extend(signals) > self._threshold

    def observe(self, record: StepRecord) -> None:
        """Learn from a step. One with a prefill, of either model, teaches about acceptance, but not about times."""
        self.acceptance.learn(record, self._history)
        self._history.observe(record)
        self._answers.observe(record)
        if record.is_prefill:
            self._prefill_s = record.verify_s if math.isfinite(record.verify_s) else 0.0
            return
        self._is_idle = self._is_idle and record.num_drafted_accepted == 0
        if record.num_drafted and self._cap < self.max_gamma:
            # A draft that nobody knows begins with little, and has more while half of it is right.
            accepted = record.num_drafted_accepted
            self._cap = 2 * self._cap if 2 * accepted >= record.num_drafted else max(self._cap // 2, 1)
        if not math.isfinite(record.seconds):
            return
        state = self._states.get(record.precision)
        if state is None and (record.draft_read_prompt or record.num_unread > _LONG_READ):
            return
        state = self._states.setdefault(record.precision, _PrecisionState(StepCostModel(self.cost)))
        state.observe_read(record)
        if record.draft_read_prompt or record.num_unread > _LONG_READ or self._probing.is_waking:
            return
        state.observe(record)
        if record.num_drafted:
            gained = record.num_drafted_accepted - self._threshold * record.num_drafted
            state.gain += _GAIN_WEIGHT * (gained - state.gain)
