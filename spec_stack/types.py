"""The types at the seams between prefill, decode and the generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

from spec_stack.controller.base import DraftSignals, StepRecord

FinishReason = Literal["eos", "stop", "length"]


class SteppableModel(Protocol):
    """A model with its cache, as both phases see it; `hf.model.CachedModel` is one."""

    @property
    def num_cached(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor: ...
    def rollback(self, num_tokens: int) -> None: ...


class TargetModel(SteppableModel, Protocol):
    """What the decode loop needs of the target on top: the tokens its next forward recomputes after a rollback."""

    @property
    def num_to_recompute(self) -> int: ...


@dataclass(frozen=True)
class Selection:
    """The prompt tokens the target reads, with their original positions, sorted.

    Raises ValueError where the two differ in length, are empty, or positions are not strictly increasing
    inside the prompt.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.positions) or not self.token_ids:
            raise ValueError(f"{len(self.token_ids)} token ids for {len(self.positions)} positions; give one for each")
        pairs = zip(self.positions, self.positions[1:], strict=False)
        if self.positions[0] < 0 or self.positions[-1] >= self.num_prompt_tokens or any(b <= a for a, b in pairs):
            raise ValueError(f"positions must increase strictly within 0…{self.num_prompt_tokens - 1}")

    @classmethod
    def everything(cls, prompt_ids: Sequence[int]) -> Selection:
        """The whole prompt: dense prefill."""
        return cls(prompt_ids, range(len(prompt_ids)), len(prompt_ids))

    @property
    def keep_rate(self) -> float:
        """The share really kept."""
        return len(self.positions) / self.num_prompt_tokens


@dataclass(frozen=True)
class Reading:
    """A prompt in the draft's own tokens, for a draft with another tokenizer. ranges: for every target token the
    half-open range of the draft tokens with its text, empty where there are none; their starts never decrease."""

    token_ids: Sequence[int]
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens. draft_probs (gamma, vocab): the warped distributions they were drawn from; None where they were
    not drawn but chosen (greedy requests, the look-ahead)."""

    token_ids: list[int] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    signals: DraftSignals = field(default_factory=DraftSignals)


@dataclass(frozen=True)
class Verification:
    """The target's answer to a proposal. next_token: the correction, or the bonus token when all were accepted."""

    num_accepted: int
    next_token: int


@dataclass
class Metrics:
    """What a request cost and did. Durations in seconds, from the call on; precision is the target's, and the bytes are
    those of the weights in memory. decode_reason: whether the draft can propose to this target, and why."""

    num_prompt_tokens: int
    num_kept_tokens: int
    num_scored_tokens: int
    specprefill: bool
    specprefill_reason: str
    policy: str
    precision: str
    draft_precision: str
    target_weight_bytes: int
    draft_weight_bytes: int
    seed: int | None
    decode_reason: str = ""
    scoring_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    controller_s: float = 0.0
    forward_s: float = 0.0
    gamma_trace: list[int] = field(default_factory=list)

    @property
    def keep_rate(self) -> float:
        return self.num_kept_tokens / self.num_prompt_tokens

    @property
    def num_steps(self) -> int:
        return len(self.gamma_trace)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed tokens; None where nothing was proposed."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first step over the time after it; None where the first step was the last."""
        later = self.num_tokens - self.num_first_tokens
        return later / (self.total_s - self.ttft_s) if later else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the derived ones included, ready for JSON."""
        derived = ("keep_rate", "num_steps", "acceptance_rate", "tokens_per_step", "decode_tokens_per_s")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class StepOutput:
    """What one step hands out. text may lag behind token_ids while it could still become a stop string or is
    half a character; finish_reason and metrics come with the last step."""

    token_ids: list[int]
    text: str
    record: StepRecord
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A drained stream. token_ids include the EOS or the tokens of the stop string; text does not."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    records: list[StepRecord] | None = None
