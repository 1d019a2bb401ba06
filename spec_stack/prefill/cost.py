"""Count a prefill's multiply-adds, and what sparse prefill can gain by fewer. Pure.

SpecPrefill, https://arxiv.org/abs/2502.02789, appendix E, with a window and with fewer scoring layers in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.scoring import num_layers_needed

TOKENS_PER_READ = 128
"""A guess for accelerators; a CPU does less arithmetic in that time, so pruning pays from shorter prompts on there."""
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, in the paper's letters: L, D, I, H, H', V."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @classmethod
    def of(cls, config: object) -> Shape:
        """Return the shape of a transformers text configuration. Raises ValueError where it is not Llama-like enough
        to say."""
        names = (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
        values = [getattr(config, name, None) for name in names]
        if not all(isinstance(value, int) and value > 0 for value in values):
            missing = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int)]
            raise ValueError(f"no cost model for this configuration, which does not say {', '.join(missing)}")
        return cls(*values)  # type: ignore[arg-type]


def prefill_flops(shape: Shape, num_tokens: int, num_seen: float | None = None, num_layers: int | None = None) -> float:
    """Multiply-adds of a prefill (table 5 of the paper).

    Parameters
    ----------
    shape
        Of the model.
    num_tokens
        S.
    num_seen
        Keys that each token meets; None is all S of them, which is how the paper counts a causal prefill.
    num_layers
        Layers that run; None is all.
    """
    seen = num_tokens if num_seen is None else min(num_seen, num_tokens)
    layers = shape.num_layers if num_layers is None else min(num_layers, shape.num_layers)
    projections = shape.hidden_size * (2 + 2 * shape.num_kv_heads / shape.num_heads)
    per_token = shape.hidden_size * (3 * shape.intermediate_size + projections + 2 * seen)
    return layers * num_tokens * per_token + num_tokens * shape.hidden_size * shape.vocab_size


@dataclass(frozen=True)
class Gain:
    """The gain to be expected of sparse prefill.

    Attributes
    ----------
    r, s
        Shares of the dense prefill's cost: the draft's pass, and the target's over the kept tokens.
    """

    r: float
    s: float

    @property
    def bound(self) -> float:
        """Dense over sparse: 1 / (r + s)."""
        return 1 / (self.r + self.s)


def expected_gain(
    target: Shape, draft: Shape, num_tokens: int, config: PrefillConfig, keep_rate: float | None = None
) -> Gain:
    """r and s by counting, no measurement: for a prefill that is bound by its arithmetic.

    The draft's last layer is counted for nothing but its keys and values, as `hf.model` runs it, and no logits of the
    prompt are. keep_rate takes the place of the configuration's for this length.
    """
    dense = prefill_flops(target, num_tokens)
    kept = (config.rate_for(num_tokens) if keep_rate is None else keep_rate) * num_tokens
    s = prefill_flops(target, round(kept)) / dense
    rest = _without_logits(draft, round(kept))
    if not needs_attention(config.scorer):
        return Gain(rest / dense, s)
    window = config.window_for(num_tokens)
    seen = None if window is None else window + config.draft_sinks
    num_layers = num_layers_needed(config, draft.num_layers)
    if num_layers is None:
        return Gain(_without_logits(draft, num_tokens, seen) / dense, s)
    return Gain((_without_logits(draft, num_tokens, seen, num_layers) + rest) / dense, s)


def break_even(target: Shape, draft: Shape, config: PrefillConfig, tokens_per_read: float = TOKENS_PER_READ) -> int:
    """The shortest prompt that sparse prefill is expected to make sooner, in tokens; 0 where it does at no length.

    Parameters
    ----------
    target, draft
        Their shapes.
    config
        The ends that are always kept count, and so does a look-ahead that scores, one forward after the other.
    tokens_per_read
        Tokens whose arithmetic takes as long as reading a model's weights once, which is what every forward of the
        look-ahead takes, and what the target's prefill takes at least.
    """
    length = 64.0
    while length <= _LONGEST:
        num_tokens = round(length)
        kept = min(num_tokens, max(sum(config.forced_tokens), config.rate_for(num_tokens) * num_tokens))
        shares = expected_gain(target, draft, num_tokens, config, kept / num_tokens)
        dense = max(prefill_flops(target, num_tokens), prefill_flops(target, 1) * tokens_per_read)
        of_target = max(prefill_flops(target, round(kept)), prefill_flops(target, 1) * tokens_per_read)
        num_looking = 1 if config.asks_prompt else config.look_ahead + 1
        looking = num_looking * tokens_per_read * prefill_flops(draft, 1, num_tokens)
        of_draft = shares.r * prefill_flops(target, num_tokens)
        if of_draft + looking + of_target < dense:
            return num_tokens
        length *= 2**0.25
    return 0


def _without_logits(
    shape: Shape, num_tokens: int, num_seen: float | None = None, num_layers: int | None = None
) -> float:
    layers = shape.num_layers if num_layers is None else num_layers
    whole = prefill_flops(shape, num_tokens, num_seen, layers - 1) - num_tokens * shape.hidden_size * shape.vocab_size
    keys = num_tokens * shape.hidden_size**2 * (1 + 2 * shape.num_kv_heads / shape.num_heads)
    return whole + keys
