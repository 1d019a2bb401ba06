"""The default policy: draft one token more only while it pays, in tokens per second."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.acceptance import AcceptanceModel, History, OnlineAcceptance, Recalibrated
from spec_stack.controller.base import DraftSignals, StepContext, StepRecord
from spec_stack.controller.cost import CostOptions, DiscountedRate, StepCostModel

_NO_SIGNALS = DraftSignals()
_GAIN_WEIGHT = 0.1
_MOST_UNRATED = 64


@dataclass(frozen=True)
class ThroughputOptions:
    """Everything has a default that works with no training at all.

    max_gamma: most tokens per step.
    predictor: a model exported by `spec_stack.controller.predictor`; without one, the policy learns its own.
    cold_threshold: probability asked for while nothing has been measured yet.
    probe_every: with drafting off, one step in this many drafts a token all the same, so that better times are noticed.
    """

    max_gamma: int = MAX_GAMMA
    predictor: str | Path | None = None
    cold_threshold: float = 0.3
    probe_every: int = 16
    cost: CostOptions = field(default_factory=CostOptions)

    def __post_init__(self) -> None:
        if not 1 <= self.max_gamma <= MAX_GAMMA:
            raise ValueError(f"max_gamma must be 1 to {MAX_GAMMA}, got {self.max_gamma}")
        if not 0 < self.cold_threshold < 1:
            raise ValueError(f"cold_threshold is a probability between 0 and 1, got {self.cold_threshold}")
        if self.probe_every < 2:
            raise ValueError(f"probe_every must be 2 or more, got {self.probe_every}; or use the policy fixed")


class _Machine:
    """What is measured of one precision: costs, the tokens/s now achieved, and what drafting has brought lately."""

    def __init__(self, options: CostOptions) -> None:
        self.cost = StepCostModel(options)
        self.rate = DiscountedRate()
        self.gain = 0.0
        # Steps from before the costs are known, when there is no telling a stall from a step.
        self.unrated: deque[StepRecord] = deque(maxlen=_MOST_UNRATED)


class Throughput:
    """Go on drafting while P(all so far and the next are accepted) > tokens/s now achieved * seconds per draft token.

    A token that is accepted with probability P brings P tokens and costs b seconds, which at the present rate
    would have brought rate * b tokens. At the optimum both are equal (Dinkelbach's condition for a ratio), so following
    the rule with the rate it achieves itself leads there. Precision enters through the measured costs alone.

    The first token is worth more than its own chance, since its signals tell whether to go on. So drafting stops
    altogether only where that chance is too low and, besides, steps with drafting have lately lost time.
    """

    name = "throughput"

    def __init__(self, options: ThroughputOptions | None = None, model: AcceptanceModel | None = None) -> None:
        """model replaces both the exported predictor and the one learned online. Raises ValueError for a bad file."""
        self.options = options or ThroughputOptions()
        self._model = model or _model(self.options)
        self._history = History()
        self._machines: dict[str, _Machine] = {}
        self._threshold = self.options.cold_threshold
        self._num_idle = 0

    def threshold(self, precision: str) -> float:
        """The probability below which a further token does not pay: tokens/s now achieved * seconds per draft token."""
        machine = self._machines.get(precision)
        if machine is None or not machine.cost.ready:
            return self.options.cold_threshold
        return machine.rate.tokens_per_s * machine.cost.per_token_s

    def choose(self, context: StepContext) -> int:
        self._threshold = self.threshold(context.precision)
        machine = self._machines.get(context.precision)
        first = self._model.joint(_NO_SIGNALS, 0, self._history)
        if first > self._threshold or machine is None or machine.gain > 0:
            self._num_idle = 0
            return min(self.options.max_gamma, context.max_gamma)
        self._num_idle += 1
        if self._num_idle % self.options.probe_every == 0:
            return min(1, context.max_gamma)
        return 0

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self._model.joint(signals, len(signals), self._history) > self._threshold

    def observe(self, record: StepRecord) -> None:
        """Learn from a step. One in which a model read the prompt teaches about acceptance, but not about times."""
        self._model.learn(record, self._history)
        self._history.observe(record)
        seconds = record.draft_s + record.verify_s + record.controller_s
        if record.is_prefill or record.draft_read_prompt or not math.isfinite(seconds):
            return
        machine = self._machines.setdefault(record.precision, _Machine(self.options.cost))
        machine.cost.observe(record.gamma, record.draft_s, record.verify_s, record.num_recomputed)
        machine.unrated.append(record)
        if machine.cost.ready:
            for step in machine.unrated:
                seconds = step.draft_s + step.verify_s + step.controller_s
                # A stall is no part of what is achieved, whatever caused it.
                bound = self.options.cost.tolerance * machine.cost.seconds(step.gamma)
                machine.rate.add(step.num_tokens, min(seconds, bound))
            machine.unrated.clear()
        if record.gamma:
            gained = record.num_accepted - self._threshold * record.gamma
            machine.gain += _GAIN_WEIGHT * (gained - machine.gain)


def _model(options: ThroughputOptions) -> AcceptanceModel:
    if options.predictor is None:
        return OnlineAcceptance()
    from spec_stack.controller.predictor import load_token_predictor

    return Recalibrated(load_token_predictor(options.predictor))
