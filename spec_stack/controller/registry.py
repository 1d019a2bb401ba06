"""The gamma policies by name, and the simple ones. Importing this loads neither numpy nor scikit-learn.

A policy belongs to one decode loop: it keeps what it has learned from one request to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from spec_stack.config import MAX_GAMMA, DecodeConfig
from spec_stack.controller.base import DraftSignals, GammaPolicy, StepContext, StepRecord


def _check_gamma(name: str, gamma: int, least: int = 0) -> None:
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not least <= gamma <= MAX_GAMMA:
        raise ValueError(f"{name} must be a whole number, {least} to {MAX_GAMMA}, got {gamma!r}")


@dataclass(frozen=True)
class FixedOptions:
    """gamma: tokens proposed in every step; 0 is plain decoding."""

    gamma: int = DecodeConfig.gamma

    def __post_init__(self) -> None:
        _check_gamma("gamma", self.gamma)


class Fixed:
    """The same gamma in every step. The name tells which, so that records of several gammas can be told apart."""

    def __init__(self, options: FixedOptions | None = None) -> None:
        self.options = options or FixedOptions()
        self.name = f"fixed-{self.options.gamma}"

    def choose(self, context: StepContext) -> int:
        return min(self.options.gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class BestFixedOptions:
    """gammas: the best gamma per precision, as `replay.best_fixed` finds it in records."""

    gammas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gammas:
            raise ValueError("best-fixed needs gammas={precision: gamma}; find them with replay.best_fixed")
        for precision, gamma in self.gammas.items():
            _check_gamma(f"gammas[{precision!r}]", gamma)


class BestFixed:
    """The gamma that gave most tokens/s per precision in earlier records."""

    name = "best-fixed"

    def __init__(self, options: BestFixedOptions) -> None:
        self.options = options

    def choose(self, context: StepContext) -> int:
        """Raises ValueError for a precision that was not measured."""
        gamma = self.options.gammas.get(context.precision)
        if gamma is None:
            raise ValueError(
                f"best-fixed knows no gamma for {context.precision!r}; it has {', '.join(sorted(self.options.gammas))}"
            )
        return min(gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class TaskOracleOptions:
    """gammas: the best gamma per (precision, task), measured beforehand on the very tasks it is used for."""

    gammas: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gammas:
            raise ValueError("task-oracle needs gammas={(precision, task): gamma}; it is for offline comparison only")
        for (precision, task), gamma in self.gammas.items():
            _check_gamma(f"gammas[{precision!r}, {task!r}]", gamma)


class TaskOracle:
    """The best gamma for the request's task, which a server does not know: for comparison (SpecKV, section 4.4)."""

    name = "task-oracle"

    def __init__(self, options: TaskOracleOptions) -> None:
        self.options = options

    def choose(self, context: StepContext) -> int:
        """Raises ValueError for a precision and task that were not measured."""
        gamma = self.options.gammas.get((context.precision, context.task))
        if gamma is None:
            raise ValueError(f"task-oracle knows no gamma for {context.precision!r} and task {context.task!r}")
        return min(gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class HeuristicOptions:
    """start: the first gamma. max_gamma: the largest."""

    start: int = 5
    max_gamma: int = MAX_GAMMA

    def __post_init__(self) -> None:
        _check_gamma("max_gamma", self.max_gamma, least=1)
        if not 1 <= self.start <= self.max_gamma:
            raise ValueError(f"start must be 1 to max_gamma ({self.max_gamma}), got {self.start}")


class Heuristic:
    """Transformers' rule for assisted generation: two more after full acceptance, else one less, never under one."""

    name = "heuristic"

    def __init__(self, options: HeuristicOptions | None = None) -> None:
        self.options = options or HeuristicOptions()
        self._gamma = self.options.start

    def choose(self, context: StepContext) -> int:
        return min(self._gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.gamma == 0:
            return
        accepted_all = record.num_accepted == record.gamma
        self._gamma = min(self._gamma + 2, self.options.max_gamma) if accepted_all else max(self._gamma - 1, 1)


@dataclass(frozen=True)
class ConfidenceOptions:
    """threshold: drafting stops after a token the draft gave less. max_gamma: the most tokens anyway."""

    threshold: float = 0.4
    max_gamma: int = MAX_GAMMA

    def __post_init__(self) -> None:
        _check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability, 0 to 1, got {self.threshold}")


class Confidence:
    """Stop after the first token the draft itself doubts (Transformers' assistant_confidence_threshold)."""

    name = "confidence"

    def __init__(self, options: ConfidenceOptions | None = None) -> None:
        self.options = options or ConfidenceOptions()

    def choose(self, context: StepContext) -> int:
        return min(self.options.max_gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.confidence[-1] >= self.options.threshold

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class EmaOptions:
    """weight: of the last step in the average. start: the average before any step. max_gamma: the largest gamma."""

    weight: float = 0.2
    start: float = 3.0
    max_gamma: int = MAX_GAMMA

    def __post_init__(self) -> None:
        _check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if not 0 <= self.start <= MAX_GAMMA:
            raise ValueError(f"start must be 0 to {MAX_GAMMA}, got {self.start}")


class Ema:
    """SGLang's adaptive rule: one more than the moving average of accepted tokens."""

    name = "ema"

    def __init__(self, options: EmaOptions | None = None) -> None:
        self.options = options or EmaOptions()
        self._average = self.options.start

    def choose(self, context: StepContext) -> int:
        gamma = min(max(round(self._average) + 1, 1), self.options.max_gamma)
        return min(gamma, context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.gamma == 0:
            return
        self._average += self.options.weight * (record.num_accepted - self._average)


_Recipe = tuple[Callable[[Any], GammaPolicy], type[Any]]


def _speckv() -> _Recipe:
    from spec_stack.controller.speckv import SpecKV, SpecKVOptions

    return SpecKV, SpecKVOptions


def _throughput() -> _Recipe:
    from spec_stack.controller.throughput import Throughput, ThroughputOptions

    return Throughput, ThroughputOptions


def _bandit() -> _Recipe:
    from spec_stack.controller.bandit import Bandit, BanditOptions

    return Bandit, BanditOptions


def _batch_throughput() -> _Recipe:
    from spec_stack.controller.batch_throughput import BatchThroughput, BatchThroughputOptions

    return BatchThroughput, BatchThroughputOptions


_REGISTRY: dict[str, Callable[[], _Recipe]] = {
    "fixed": lambda: (Fixed, FixedOptions),
    "best-fixed": lambda: (BestFixed, BestFixedOptions),
    "heuristic": lambda: (Heuristic, HeuristicOptions),
    "confidence": lambda: (Confidence, ConfidenceOptions),
    "ema": lambda: (Ema, EmaOptions),
    "speckv": _speckv,
    "throughput": _throughput,
    "bandit": _bandit,
    "batch-throughput": _batch_throughput,
    "task-oracle": lambda: (TaskOracle, TaskOracleOptions),
}
POLICY_NAMES = tuple(_REGISTRY)
CLOCK_POLICY_NAMES = ("throughput", "bandit", "batch-throughput")
"""Policies that decide by measured time, so that no two runs decide alike."""
LIVE_POLICY_NAMES = tuple(name for name in POLICY_NAMES if name not in ("best-fixed", "task-oracle"))
"""Policies that need no options: the other two want gammas measured beforehand."""


def make_policy(name: str, **options: Any) -> GammaPolicy:
    """Build a policy by name, its options as keywords: make_policy("fixed", gamma=4).

    Raises ValueError for an unknown name (naming the known ones), an unknown option and a bad value.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    policy, options_type = _REGISTRY[name]()
    known = [entry.name for entry in fields(options_type)]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"policy {name!r} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return policy(options_type(**options))
    except (TypeError, AttributeError, OSError) as error:
        raise ValueError(f"policy {name!r} cannot be built from {options}: {error}") from error
