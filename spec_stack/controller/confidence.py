"""Stop after the first token that the draft itself doubts."""

from __future__ import annotations

from dataclasses import dataclass

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext, check_gamma


@dataclass
class Confidence(Policy):
    """Stop after the first token that the draft itself doubts.

    Parameters
    ----------
    threshold : float
        Drafting stops after a token that the draft gave a smaller probability.
    max_gamma : int
        Most tokens anyway.

    Notes
    -----
    `assistant_confidence_threshold` of transformers' assisted generation, from "Dynamic Speculation Lookahead
    Accelerates Speculative Decoding of Large Language Models" (https://arxiv.org/abs/2405.04304).
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
