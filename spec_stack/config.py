"""Configuration. Every default lives here, once; the CLI and the docs read it from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

DraftContext = Literal["full", "kept"]
MAX_GAMMA = 16


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class PrefillConfig:
    """How the prompt is scored and which part of it the target reads (SpecPrefill, sections 3.2.1-3.2.4).

    keep_rate: share of the prompt's chunks that the target reads, in (0, 1]; 1.0 is dense prefill.
    look_ahead: draft tokens whose queries score the prompt beside the last prompt token's; they are
        also the first proposal. 0 scores by the last prompt token alone.
    pool_kernel: width, in tokens, of the average that smooths attention; odd, 1 is none.
    chunk_size: tokens per chunk; chunks are kept or dropped whole.
    keep_first, keep_last: chunks at either end that are always kept.
    min_prompt_tokens: shorter prompts are prefilled densely unless a call asks otherwise.
    prefill_chunk: most tokens in one forward pass; bounds the memory of long prefills.
    draft_context: whether the draft decodes over the full prompt or over the kept slots only.
    """

    keep_rate: float = 0.2
    look_ahead: int = 8
    pool_kernel: int = 13
    chunk_size: int = 32
    keep_first: int = 1
    keep_last: int = 2
    min_prompt_tokens: int = 2048
    prefill_chunk: int = 8192
    draft_context: DraftContext = "kept"

    def __post_init__(self) -> None:
        _require(0 < self.keep_rate <= 1, f"keep_rate must be in (0, 1], got {self.keep_rate}; 1.0 is dense prefill")
        _require(self.look_ahead >= 0, f"look_ahead must be 0 or more, got {self.look_ahead}")
        _require(
            self.pool_kernel >= 1 and self.pool_kernel % 2 == 1,
            f"pool_kernel must be odd (1 is no pooling), got {self.pool_kernel}; an even one would shift the scores",
        )
        _require(self.chunk_size >= 1, f"chunk_size must be 1 or more, got {self.chunk_size}")
        _require(self.keep_first >= 0, f"keep_first must be 0 or more, got {self.keep_first}")
        _require(
            self.keep_last >= 1,
            f"keep_last must be 1 or more, got {self.keep_last}; decoding continues from the last prompt token",
        )
        _require(self.min_prompt_tokens >= 0, f"min_prompt_tokens must be 0 or more, got {self.min_prompt_tokens}")
        _require(self.prefill_chunk >= 1, f"prefill_chunk must be 1 or more, got {self.prefill_chunk}")
        _require(
            self.draft_context in get_args(DraftContext),
            f"draft_context must be one of {list(get_args(DraftContext))}, got {self.draft_context!r}",
        )

    @classmethod
    def raw(cls, keep_rate: float = keep_rate) -> PrefillConfig:
        """The paper's plain variant: last-token attention, single tokens, no pooling, no look-ahead."""
        return cls(keep_rate=keep_rate, look_ahead=0, pool_kernel=1, chunk_size=1, keep_first=0, keep_last=1)

    @classmethod
    def full(cls, keep_rate: float = keep_rate) -> PrefillConfig:
        """The paper's "Full" variant: pooling and chunks, no look-ahead."""
        return cls(keep_rate=keep_rate, look_ahead=0)

    @classmethod
    def full_look_ahead(cls, keep_rate: float = keep_rate) -> PrefillConfig:
        """The paper's "Full LAH" variant, with eight look-ahead tokens: the default."""
        return cls(keep_rate=keep_rate)


@dataclass(frozen=True)
class DecodeConfig:
    """How far the draft runs ahead.

    policy: name of the gamma policy (see `spec_stack.controller.policies`).
    gamma: tokens proposed per step under the policy "fixed"; 0 is plain decoding.
    """

    policy: str = "throughput"
    gamma: int = 4

    def __post_init__(self) -> None:
        _require(0 <= self.gamma <= MAX_GAMMA, f"gamma must be 0 to {MAX_GAMMA}, got {self.gamma}")


@dataclass(frozen=True)
class SpecStackConfig:
    """Everything a `SpecStackGenerator` can be told once, for all its requests."""

    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
