"""Configuration. Every default lives here, once; the CLI and the docs read it from here."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, get_args

DraftContext = Literal["full", "kept"]
Scorer = Literal["attention", "anchors", "fused"]
KeepCurve = tuple[tuple[int, float], ...]
MAX_GAMMA = 16
MAX_LOOK_AHEAD = 64
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "nf4")
OTHER_PRECISION = "other"
"""What records call a precision of no name of ours: a checkpoint stored quantized in another way."""
# Logits divided by less overflow; what is meant is greedy.
MIN_TEMPERATURE = 1e-3


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_number(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(number, f"{name} must be a number, got {value!r}")


def _require_int(name: str, value: object, least: int, most: float = math.inf, hint: str = "") -> None:
    """Refuse what is no whole number (a bool or 2.0 included) or is out of range."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    bounds = f"{least} or more" if most == math.inf else f"{least} to {most}"
    _require(whole and least <= value <= most, f"{name} must be a whole number, {bounds}, got {value!r}{hint}")  # type: ignore[operator]


def _require_curve(curve: KeepCurve) -> None:
    pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in curve) and bool(curve)
    _require(pairs, f"keep_rate must be a number or (num_tokens, keep_rate) pairs, got {curve!r}")
    for num_tokens, rate in curve:
        _require_int("a length of the keep_rate curve", num_tokens, 1)
        _require_number("a rate of the keep_rate curve", rate)
        _require(0 < rate <= 1, f"every rate of the keep_rate curve must be in (0, 1], got {rate}")
    lengths = [num_tokens for num_tokens, _ in curve]
    _require(lengths == sorted(set(lengths)), f"the lengths of the keep_rate curve must increase, got {lengths}")


def _require_heads(heads: tuple[tuple[int, int], ...]) -> None:
    pairs = isinstance(heads, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in heads)
    _require(pairs and bool(heads), f"scoring_heads must be (layer, head) pairs or None, got {heads!r}")
    for layer, head in heads:
        _require_int("a layer of scoring_heads", layer, 0)
        _require_int("a head of scoring_heads", head, 0)


@dataclass(frozen=True)
class PrefillConfig:
    """How the prompt is scored and which part of it the target prefills.

    Parameters
    ----------
    keep_rate
        Share of the prompt's chunks that the target prefills, in (0, 1]; 1.0 is dense prefill. Or a curve by length:
        (num_tokens, keep_rate) pairs with increasing lengths, linear in the logarithm of the length between them and
        level beyond.
    look_ahead
        Draft tokens whose queries score the prompt beside the last prompt token's; they are also the first proposal. 0
        scores by the last prompt token alone.
    pool_kernel
        Width, in tokens, of the average that smooths attention; odd, 1 is none.
    chunk_size
        Tokens per chunk; chunks are kept or dropped whole.
    keep_first, keep_last
        Chunks at either end that are always kept.
    min_prompt_tokens
        Shorter prompts are prefilled densely unless a call asks otherwise.
    prefill_chunk
        Most tokens in one forward pass; bounds the memory of long prefills.
    draft_context
        Whether the draft decodes over the full prompt or over the kept slots only. A draft with a recurrent state keeps
        the full prompt either way.
    draft_window
        Positions that a token sees, up to itself, while the draft prefills the prompt; the scoring queries and all
        decoding see everything. Layers with a smaller window of their own keep it. None is dense, and quadratic.
    draft_sinks
        Positions at the beginning of the prompt that are seen beside the window.
    scoring_layers
        The prompt is prefilled and scored by so many of the draft's layers alone; the whole draft then prefills the
        kept tokens, over which it looks ahead and decodes. Instead of the look-ahead's, the queries of as many tokens
        at the end of the prompt score. None is all layers.
    scoring_heads
        (layer, head) pairs whose attention scores the prompt; None is all of them.
    neighbour_share
        A chunk has at least this share of its better neighbour's score, in [0, 1): evidence that crosses a chunk's
        border is kept whole. 0 is none.
    scorer
        "attention": the draft's (the paper's rule). "anchors": rare words that the end of the prompt shares with the
        rest; the draft prefills the kept tokens only. "fused": both, by rank.
    anchor_weight
        Weight of the anchors' ranks against the attention's under "fused", in (0, 1).
    anchor_tail
        Tokens at the end of the prompt in which the question is looked for where nobody says where it is; those at
        their end count most.

    Notes
    -----
    The defaults are SpecPrefill's "Full LAH" (https://arxiv.org/abs/2502.02789, sections 3.2.1-3.2.4) with eight
    look-ahead tokens. `calibrated` settings come from a calibration file (see `spec_stack.calibration`).
    """

    keep_rate: float | KeepCurve = 0.2
    look_ahead: int = 8
    pool_kernel: int = 13
    chunk_size: int = 32
    keep_first: int = 1
    keep_last: int = 2
    min_prompt_tokens: int = 2048
    prefill_chunk: int = 8192
    draft_context: DraftContext = "kept"
    draft_window: int | None = None
    draft_sinks: int = 64
    scoring_layers: int | None = None
    scoring_heads: tuple[tuple[int, int], ...] | None = None
    neighbour_share: float = 0.0
    scorer: Scorer = "attention"
    anchor_weight: float = 0.6
    anchor_tail: int = 96

    def __post_init__(self) -> None:
        if isinstance(self.keep_rate, tuple):
            _require_curve(self.keep_rate)
        else:
            _require_number("keep_rate", self.keep_rate)
            _require(
                0 < self.keep_rate <= 1, f"keep_rate must be in (0, 1], got {self.keep_rate}; 1.0 is dense prefill"
            )
        _require_int("look_ahead", self.look_ahead, 0, MAX_LOOK_AHEAD)
        _require_int("pool_kernel", self.pool_kernel, 1)
        _require(
            self.pool_kernel % 2 == 1,
            f"pool_kernel must be odd (1 is no pooling), got {self.pool_kernel}; an even one would shift the scores",
        )
        _require_int("chunk_size", self.chunk_size, 1)
        _require_int("keep_first", self.keep_first, 0)
        _require_int("keep_last", self.keep_last, 1, hint="; decoding continues from the last prompt token")
        _require_int("min_prompt_tokens", self.min_prompt_tokens, 0)
        _require_int("prefill_chunk", self.prefill_chunk, 1)
        _require(
            self.draft_context in get_args(DraftContext),
            f"draft_context must be one of {list(get_args(DraftContext))}, got {self.draft_context!r}",
        )
        if self.draft_window is not None:
            _require_int("draft_window", self.draft_window, 1, hint="; None is dense")
        _require_int("draft_sinks", self.draft_sinks, 0)
        if self.scoring_layers is not None:
            _require_int("scoring_layers", self.scoring_layers, 1, hint="; None is all layers")
        if self.scoring_heads is not None:
            _require_heads(self.scoring_heads)
        _require_number("neighbour_share", self.neighbour_share)
        _require(0 <= self.neighbour_share < 1, f"neighbour_share must be in [0, 1), got {self.neighbour_share}")
        _require(
            self.scorer in get_args(Scorer), f"scorer must be one of {list(get_args(Scorer))}, got {self.scorer!r}"
        )
        _require_number("anchor_weight", self.anchor_weight)
        _require(
            0 < self.anchor_weight < 1,
            f"anchor_weight must be in (0, 1), got {self.anchor_weight}; for one side alone set scorer",
        )
        _require_int("anchor_tail", self.anchor_tail, 1)

    def rate_for(self, num_prompt_tokens: int) -> float:
        """The keep_rate of a prompt of this length."""
        if not isinstance(self.keep_rate, tuple):
            return self.keep_rate
        lengths, rates = zip(*self.keep_rate, strict=True)
        after = bisect_left(lengths, num_prompt_tokens)
        if after in (0, len(lengths)):
            return float(rates[min(after, len(rates) - 1)])
        low, high = lengths[after - 1], lengths[after]
        share = math.log(num_prompt_tokens / low) / math.log(high / low)
        return float(rates[after - 1] + share * (rates[after] - rates[after - 1]))

    @classmethod
    def raw(cls, keep_rate: float | KeepCurve = keep_rate) -> PrefillConfig:
        """The paper's plain variant: last-token attention, single tokens, no pooling, no look-ahead."""
        return cls(keep_rate=keep_rate, look_ahead=0, pool_kernel=1, chunk_size=1, keep_first=0, keep_last=1)

    @classmethod
    def full(cls, keep_rate: float | KeepCurve = keep_rate) -> PrefillConfig:
        """The paper's "Full" variant: pooling and chunks, no look-ahead."""
        return cls(keep_rate=keep_rate, look_ahead=0)

    @classmethod
    def full_look_ahead(cls, keep_rate: float | KeepCurve = keep_rate) -> PrefillConfig:
        """The paper's "Full LAH" variant, with eight look-ahead tokens: the default."""
        return cls(keep_rate=keep_rate)


@dataclass(frozen=True)
class LoadConfig:
    """In what precision a pair is loaded.

    precision: of the target. "auto" is how a checkpoint is stored that is quantized already, else fp32 on a CPU and
        bf16 elsewhere.
    draft_precision: "auto" is how it is stored likewise; else the target's, or where that is a quantized one, fp32 on
        a CPU and bf16 elsewhere.
    """

    precision: str = "auto"
    draft_precision: str = "auto"

    def __post_init__(self) -> None:
        for name in ("precision", "draft_precision"):
            value = getattr(self, name)
            _require(value in ("auto", *PRECISIONS), f"unknown {name} {value!r}; use one of {['auto', *PRECISIONS]}")


@dataclass(frozen=True)
class DecodeConfig:
    """How far the draft runs ahead.

    policy: name of the gamma policy (see `spec_stack.controller.registry`).
    gamma: tokens proposed per step under the policy "fixed"; 0 is plain decoding.
    """

    policy: str = "throughput"
    gamma: int = 4

    def __post_init__(self) -> None:
        _require_int("gamma", self.gamma, 0, MAX_GAMMA)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    temperature 0 is greedy. top_k 0 and top_p 1.0 are off; both are applied after the temperature, in that
    order, as in transformers. A seed makes a sampled request reproducible under a policy that does not watch the
    clock. stop: strings that end the text; they are not part of it (special tokens are no text, so they never match).
    ignore_eos goes on past the end-of-sequence token (for benchmarks). No other setting of a model's generation
    config is applied (a repetition penalty, say).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, 1)
        _require_number("temperature", self.temperature)
        _require_number("top_p", self.top_p)
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"temperature must be 0 (greedy) or {MIN_TEMPERATURE} and more, got {self.temperature}",
        )
        _require_int("top_k", self.top_k, 0, hint="; 0 is off")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}; 1.0 is off")
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**63 - 1)
        _require(
            all(isinstance(text, str) and text for text in self.stop),
            f"stop must be non-empty strings, got {self.stop!r}",
        )


@dataclass(frozen=True)
class SpecStackConfig:
    """Everything a `SpecStackGenerator` can be told once, for all its requests."""

    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
