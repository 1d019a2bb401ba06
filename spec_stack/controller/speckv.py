"""The SpecKV paper's policy (section 4.3), made causal: it reads the signals of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, StepContext, StepRecord
from spec_stack.controller.predictor import STEP_FEATURES, load_step_predictor, step_features


class RatePredictor(Protocol):
    """Predicts a step's acceptance rate from STEP_FEATURES."""

    def acceptance_rate(self, features: Sequence[float]) -> float: ...


class OnlineRidge:
    """Ridge regression of the acceptance rate, one observation at a time."""

    def __init__(self, alpha: float = 1.0) -> None:
        size = len(STEP_FEATURES) + 1
        self._gram = alpha * np.eye(size)
        self._moment = np.zeros(size)
        self._weights: NDArray[np.float64] = np.zeros(size)
        self.num_seen = 0

    def learn(self, features: Sequence[float], rate: float) -> None:
        values = np.array([*features, 1.0])
        self._gram += np.outer(values, values)
        self._moment += values * rate
        self._weights = np.asarray(np.linalg.solve(self._gram, self._moment), dtype=np.float64)
        self.num_seen += 1

    def acceptance_rate(self, features: Sequence[float]) -> float:
        return min(max(float(self._weights @ np.array([*features, 1.0])), 0.0), 1.0)


@dataclass(frozen=True)
class SpecKVOptions:
    """gammas: the candidates. predictor: an exported step predictor; without one a ridge is learned online.

    start: gamma while no step with signals has gone before. explore: steps that try the candidates in turn
    before the online ridge is asked.
    """

    gammas: tuple[int, ...] = (2, 4, 6, 8)
    predictor: str | Path | None = None
    start: int = 4
    explore: int = 16

    def __post_init__(self) -> None:
        if not self.gammas or any(not 1 <= gamma <= MAX_GAMMA for gamma in self.gammas):
            raise ValueError(f"gammas must be one or more of 1 to {MAX_GAMMA}, got {self.gammas}")
        if not 0 <= self.start <= MAX_GAMMA:
            raise ValueError(f"start must be 0 to {MAX_GAMMA}, got {self.start}")
        if self.explore < 0:
            raise ValueError(f"explore must be 0 or more, got {self.explore}")


class SpecKV:
    """argmax over the candidates of acceptance_rate * gamma + 1: tokens per step, whatever a step costs."""

    name = "speckv"

    def __init__(self, options: SpecKVOptions | None = None, predictor: RatePredictor | None = None) -> None:
        """predictor replaces the exported one. Raises ValueError for a bad predictor file."""
        self.options = options or SpecKVOptions()
        if predictor is None and self.options.predictor is not None:
            predictor = load_step_predictor(self.options.predictor)
        self._online = OnlineRidge() if predictor is None else None
        self._predictor: RatePredictor = predictor or OnlineRidge()
        self._signals: DraftSignals | None = None

    def choose(self, context: StepContext) -> int:
        if self._signals is None or context.last is None:
            return min(self.options.start, context.max_gamma)
        candidates = self.options.gammas
        if self._online is not None and self._online.num_seen < self.options.explore:
            return min(candidates[self._online.num_seen % len(candidates)], context.max_gamma)
        predictor = self._online or self._predictor
        expected = [
            predictor.acceptance_rate(step_features(self._signals, context.precision, gamma)) * gamma + 1
            for gamma in candidates
        ]
        return min(candidates[expected.index(max(expected))], context.max_gamma)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True

    def observe(self, record: StepRecord) -> None:
        """Remember the step's signals for the next one, and learn how they foretold this one."""
        if not record.signals:
            return
        if self._online is not None and self._signals is not None and not record.is_prefill:
            rate = record.num_accepted / record.gamma
            self._online.learn(step_features(self._signals, record.precision, record.gamma), rate)
        self._signals = record.signals
