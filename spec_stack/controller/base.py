"""What a policy sees before and during a step, and what a step leaves behind. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class DraftSignals:
    """The draft's own view of the tokens it drafted, one entry per token, in order.

    entropy: of the draft's unwarped next-token distribution, in bits.
    confidence: the largest probability of that distribution.
    """

    entropy: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entropy)

    def append(self, entropy: float, confidence: float) -> None:
        self.entropy.append(entropy)
        self.confidence.append(confidence)

    @property
    def mean_entropy(self) -> float:
        return sum(self.entropy) / len(self.entropy)

    @property
    def max_entropy(self) -> float:
        return max(self.entropy)

    @property
    def mean_confidence(self) -> float:
        return sum(self.confidence) / len(self.confidence)

    @property
    def min_confidence(self) -> float:
        return min(self.confidence)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one request: a proposal and its verification.

    gamma counts the tokens really proposed, num_accepted those the target agreed with, num_tokens
    those handed out (num_accepted + 1, less what EOS, a stop string or max_tokens cut off).
    draft_s covers the draft's forwards (with what it had to catch up on), verify_s the target's forward
    and the acceptance test, controller_s the policy. In the prefill step draft_s is what scoring the prompt took,
    verify_s holds the target's prefill, and gamma is the look-ahead. After a dense prefill the first step that
    drafts has the draft read the whole prompt: draft_read_prompt marks it, and its draft_s says nothing of later ones.
    num_recomputed counts the tokens that the target recomputed in this step because a rollback had undone its
    recurrent state (0 for models without one); verify_s has their cost.
    """

    request_id: str
    step: int
    policy: str
    precision: str
    task: str
    is_prefill: bool
    keep_rate: float
    gamma: int
    num_accepted: int
    num_tokens: int
    signals: DraftSignals
    draft_s: float
    verify_s: float
    controller_s: float
    draft_read_prompt: bool = False
    num_recomputed: int = 0


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything known before a step. A policy never sees the signals of the step it is choosing.

    max_gamma is the most that can still be used: one token less than the request has left, since the
    target adds one of its own.
    """

    step: int
    max_gamma: int
    num_prompt_tokens: int
    num_cached: int
    num_generated: int
    last: StepRecord | None
    precision: str
    task: str = ""
    batch_size: int = 1


@runtime_checkable
class GammaPolicy(Protocol):
    """Decides how far the draft may run ahead. Called by the decode loop, once per step and once per drafted token."""

    name: str

    def choose(self, context: StepContext) -> int:
        """The most tokens to propose now; 0 is plain decoding. Values over `context.max_gamma` are cut to it."""
        ...

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        """Asked after every drafted token with the signals so far; False ends the proposal here."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Told what a step did, the prefill step included (`record.is_prefill`)."""
        ...
