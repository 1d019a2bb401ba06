"""Policies of one rule each: a fixed gamma, and the rules of transformers and SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_stack.config import MAX_GAMMA, DecodeConfig
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, check_gamma


@dataclass
class Fixed(Policy):
    """The same gamma in every step; the policy's name includes it, to tell records apart.

    Parameters
    ----------
    gamma : int
        Tokens proposed in every step; 0 is plain decoding.
    """

    gamma: int = DecodeConfig.gamma

    def __post_init__(self) -> None:
        check_gamma("gamma", self.gamma)
        self.name = f"fixed-{self.gamma}"

    def choose(self, context: StepContext) -> int:
        return self.gamma


@dataclass
class Confidence(Policy):
    """Stop drafting after the first token with low draft confidence.

    `assistant_confidence_threshold` of transformers' assisted generation (https://arxiv.org/abs/2405.04304).

    Parameters
    ----------
    threshold : float
        Drafting stops after a token with a smaller draft probability.
    max_gamma : int
        Most tokens per step.
    """

    threshold: float = 0.4
    max_gamma: int = MAX_GAMMA

    name = "confidence"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability, 0 to 1, got {self.threshold}")

    def choose(self, context: StepContext) -> int:
        return self.max_gamma

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.confidence[-1] >= self.threshold


@dataclass
class Heuristic(Policy):
    """Two tokens more after full acceptance, else one less, never under one.

    `num_assistant_tokens_schedule="heuristic"` of transformers' assisted generation
    (https://huggingface.co/docs/transformers/main_classes/text_generation).

    Parameters
    ----------
    start : int
        The first gamma.
    max_gamma : int
        The largest.
    """

    start: int = 5
    max_gamma: int = MAX_GAMMA
    _gamma: int = field(init=False, repr=False)

    name = "heuristic"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 1 <= self.start <= self.max_gamma:
            raise ValueError(f"start must be 1 to max_gamma ({self.max_gamma}), got {self.start}")
        self._gamma = self.start

    def choose(self, context: StepContext) -> int:
        return self._gamma

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.num_drafted == 0:
            return
        accepted_all = record.num_drafted_accepted == record.num_drafted
        self._gamma = min(self._gamma + 2, self.max_gamma) if accepted_all else max(self._gamma - 1, 1)


@dataclass
class Ema(Policy):
    """One more than the exponential moving average of accepted tokens (SGLang's `--speculative-adaptive`).

    Parameters
    ----------
    weight : float
        Of the last step in the average, in (0, 1].
    start : float
        The average before any step.
    max_gamma : int
        The largest gamma.
    gammas : tuple of int
        Allowed values; the smallest that is not under the rule's is chosen. Empty allows all.
    """

    weight: float = 0.2
    start: float = 3.0
    max_gamma: int = MAX_GAMMA
    gammas: tuple[int, ...] = ()
    _average: float = field(init=False, repr=False)

    name = "ema"

    def __post_init__(self) -> None:
        check_gamma("max_gamma", self.max_gamma, least=1)
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if not 0 <= self.start <= MAX_GAMMA:
            raise ValueError(f"start must be 0 to {MAX_GAMMA}, got {self.start}")
        for gamma in self.gammas:
            check_gamma("gammas", gamma, least=1)
        self._average = self.start

    def choose(self, context: StepContext) -> int:
        wanted = min(round(self._average) + 1, self.max_gamma)
        # Up, not down: an average cannot exceed the gamma in use, so from 2 it would never reach 4.
        reachable = [gamma for gamma in self.gammas if gamma <= self.max_gamma]
        return min((gamma for gamma in reachable if gamma >= wanted), default=max(reachable, default=wanted))

    def observe(self, record: StepRecord) -> None:
        if record.is_prefill or record.num_drafted == 0:
            return
        self._average += self.weight * (record.num_drafted_accepted - self._average)
