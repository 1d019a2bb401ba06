"""Multiply-adds of a prefill, the expected gain of sparse prefill, and the shortest prompt that gains. Pure.

SpecPrefill, https://arxiv.org/abs/2502.02789, appendix E, extended by a window and by fewer scoring layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.scoring import has_one_forward, num_layers_needed

# Lengths that are tried, rising by 9 %.
_SHORTEST, _LONGEST, _LENGTHS_PER_DOUBLING = 64, 1 << 20, 8
TOKENS_PER_READ = 128
"""Tokens whose arithmetic takes as long as reading the weights once, the least time of any forward; a guess."""
LAUNCHES_PER_LAYER = 1.4e11
"""Multiply-adds in the time in which a GPU's host launches a layer's kernels, the least time of an eager forward there:
0.62 ms on an H100, whose prefills do 2.3e14 a second (experiments/results/bench_gpu.json)."""
NEVER = 1 << 30
"""Longer than any prompt."""


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
        """The shape of a transformers text configuration. Raises ValueError where it is not Llama-like."""
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
    """Multiply-adds of a prefill of num_tokens (table 5 of the paper).

    num_seen: keys per token; None is all tokens, which is how the paper counts a causal prefill. num_layers: layers
    that run; None is all.
    """
    seen = num_tokens if num_seen is None else min(num_seen, num_tokens)
    layers = shape.num_layers if num_layers is None else min(num_layers, shape.num_layers)
    projections = shape.hidden_size * (2 + 2 * shape.num_kv_heads / shape.num_heads)
    per_token = shape.hidden_size * (3 * shape.intermediate_size + projections + 2 * seen)
    return layers * num_tokens * per_token + num_tokens * shape.hidden_size * shape.vocab_size


def num_kept(config: PrefillConfig, num_tokens: int) -> int:
    """Kept tokens of a prompt without protected spans, its forced ends among them."""
    return min(num_tokens, max(sum(config.forced_tokens), round(config.rate_for(num_tokens) * num_tokens)))


def draft_flops(draft: Shape, num_tokens: int, config: PrefillConfig) -> float:
    """Multiply-adds of the draft's pass over a prompt, and over its kept tokens where it has not run all layers.

    The last layer counts for its keys and values alone, as `hf.model` runs it, without logits of the prompt.
    """
    rest = _without_logits(draft, num_kept(config, num_tokens))
    if not needs_attention(config.scorer):
        return rest
    window = config.window_for(num_tokens)
    seen = None if window is None else window + config.draft_sinks
    num_layers = num_layers_needed(config, draft.num_layers)
    return _without_logits(draft, num_tokens, seen, num_layers) + (0 if num_layers is None else rest)


def expected_gain(target: Shape, draft: Shape, num_tokens: int, config: PrefillConfig) -> float:
    """Dense over sparse prefill by counting, where both are compute-bound: 1 / (r + s), r the draft's share of the
    dense prefill and s that of the kept tokens."""
    sparse = draft_flops(draft, num_tokens, config) + prefill_flops(target, num_kept(config, num_tokens))
    return prefill_flops(target, num_tokens) / sparse


def counted_break_even(target: Shape, draft: Shape, config: PrefillConfig, on_gpu: bool = False) -> int:
    """The shortest prompt, in tokens, that sparse prefill is expected to speed up, exact to 9 %; 0 for none.

    on_gpu: whether a forward takes at least as long as the launches of its kernels.
    """
    launches = LAUNCHES_PER_LAYER if on_gpu else 0

    def least(shape: Shape, num_seen: int | None = None) -> float:
        return max(TOKENS_PER_READ * prefill_flops(shape, 1, num_seen), launches * shape.num_layers)

    def dense(num_tokens: int) -> float:
        return max(prefill_flops(target, num_tokens), least(target))

    def sparse(num_tokens: int) -> float:
        scoring = max(draft_flops(draft, num_tokens, config), launches * draft.num_layers)
        queries = _num_query_forwards(config, num_tokens) * least(draft, num_tokens)
        return scoring + queries + dense(num_kept(config, num_tokens))

    steps = range(_LENGTHS_PER_DOUBLING * int(math.log2(_LONGEST / _SHORTEST)) + 1)
    lengths = (round(_SHORTEST * 2 ** (step / _LENGTHS_PER_DOUBLING)) for step in steps)
    return next((length for length in lengths if sparse(length) < dense(length)), 0)


def _num_query_forwards(config: PrefillConfig, num_tokens: int) -> int:
    """The draft's forwards of scoring queries behind its pass over the prompt."""
    if not needs_attention(config.scorer) or has_one_forward(config, num_tokens):
        return 0
    return 1 if config.queries_from_prompt else config.look_ahead + 1


def with_threshold(config: PrefillConfig, target: object, draft: object, on_gpu: bool = False) -> PrefillConfig:
    """Raise min_prompt_tokens to where pruning is expected to pay, unless it was given or calibrated.

    target, draft: transformers text configurations; the default stays for layers without a cost model.
    """
    if "min_prompt_tokens" in config.given:
        return config
    try:
        even = counted_break_even(Shape.of(target), Shape.of(draft), config, on_gpu) or NEVER
    except ValueError:
        return config
    return config if even <= config.min_prompt_tokens else replace(config, min_prompt_tokens=even)


def _without_logits(
    shape: Shape, num_tokens: int, num_seen: float | None = None, num_layers: int | None = None
) -> float:
    layers = shape.num_layers if num_layers is None else num_layers
    whole = prefill_flops(shape, num_tokens, num_seen, layers - 1) - num_tokens * shape.hidden_size * shape.vocab_size
    keys = num_tokens * shape.hidden_size**2 * (1 + 2 * shape.num_kv_heads / shape.num_heads)
    return whole + keys
