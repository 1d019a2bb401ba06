"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceModel, History, OnlineAcceptance
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma
from spec_stack.controller.cost import CostOptions, DiscountedRate, StepCostModel

_GAIN_WEIGHT = 0.1
_MAX_UNRATED = 64


@dataclass
class _PrecisionState:
    """What is measured at one precision.

    rate: the tokens/s now achieved. gain: what drafting has lately brought, in tokens a step.
    unrated: steps from before the costs are known, when there is no telling a stall from a step.
    """

    cost: StepCostModel
    rate: DiscountedRate = field(default_factory=DiscountedRate)
    gain: float = 0.0
    unrated: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_MAX_UNRATED))

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
                self.rate.add(step.num_tokens, min(step.seconds, bound))
            self.unrated.clear()


@dataclass
class Throughput(Policy):
    """Go on drafting while P(all so far and the next are accepted) > tokens/s now achieved * seconds per draft token.

    A token that is accepted with probability P brings P tokens and costs b seconds, which at the present rate
    would have brought rate * b tokens. At the optimum both are equal (Dinkelbach's condition for a ratio,
    https://doi.org/10.1287/mnsc.13.7.492), so following the rule with the rate it achieves itself leads there.
    Precision enters through the measured costs alone.

    The first token is worth more than its own chance, since its signals tell whether to go on. So drafting stops
    altogether only where that chance is too low and, besides, steps with drafting have lately lost time.

    Parameters
    ----------
    max_gamma : int
        Most tokens per step.
    cold_threshold : float
        Probability asked for while nothing has been measured yet.
    probe_every : int
        With drafting off, one step in this many drafts a token all the same, so that better times are noticed.
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
    _num_idle: int = field(init=False, repr=False, default=0)

    name = "throughput"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.cold_threshold < 1:
            raise ValueError(f"cold_threshold is a probability between 0 and 1, got {self.cold_threshold}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")
        self._threshold = self.cold_threshold

    def threshold(self, precision: str) -> float:
        """The probability below which a further token does not pay: tokens/s now achieved * seconds per draft token."""
        state = self._states.get(precision)
        if state is None or not state.cost.ready:
            return self.cold_threshold
        return state.rate.tokens_per_s * state.cost.per_token_s

    def choose(self, context: StepContext) -> int:
        self._threshold = self.threshold(context.precision)
        state = self._states.get(context.precision)
        first = self.acceptance.begin(self._history)
        if first > self._threshold or state is None or state.gain > 0:
            self._num_idle = 0
            return self.max_gamma
        self._num_idle += 1
        return int(self._num_idle % self.probe_every == 0)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self.acceptance.extend(signals) > self._threshold

    def observe(self, record: StepRecord) -> None:
        """Learn from a step. One with a prefill, of either model, teaches about acceptance, but not about times."""
        self.acceptance.learn(record, self._history)
        self._history.observe(record)
        if record.is_prefill or record.draft_read_prompt or not math.isfinite(record.seconds):
            return
        state = self._states.setdefault(record.precision, _PrecisionState(StepCostModel(self.cost)))
        state.observe(record)
        if record.num_drafted:
            gained = record.num_drafted_accepted - self._threshold * record.num_drafted
            state.gain += _GAIN_WEIGHT * (gained - state.gain)
