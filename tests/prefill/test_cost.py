from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Mamba2Config

from spec_stack import PrefillConfig
from spec_stack.prefill.cost import (
    LAUNCHES_PER_LAYER,
    Shape,
    counted_break_even,
    expected_gain,
    prefill_flops,
    with_threshold,
)

LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = Shape(80, 8192, 28672, 64, 8, 128256)
LLAMA_405B = Shape(126, 16384, 53248, 128, 8, 128256)


@pytest.mark.parametrize(("base", "published"), [(LLAMA_70B, 0.1424), (LLAMA_405B, 0.0296)])
def test_the_papers_ratios_come_out_of_its_formula(base: Shape, published: float) -> None:
    """Table 6, which does not say the length; figure 9, beside it, is of 32K tokens."""
    ratio = prefill_flops(LLAMA_8B, 32768) / prefill_flops(base, 32768)
    assert ratio == pytest.approx(published, abs=0.0015)


def test_the_formula_counts_what_its_table_lists() -> None:
    shape = Shape(2, 8, 24, 4, 2, 50)
    per_layer = 3 * 10 * 8 * 24 + 10 * 8**2 * (2 + 2 * 2 / 4) + 2 * 10**2 * 8
    assert prefill_flops(shape, 10) == 2 * per_layer + 10 * 8 * 50


def test_a_window_early_exit_and_bm25_each_raise_the_gain() -> None:
    def gain(**options: object) -> float:
        return expected_gain(LLAMA_70B, LLAMA_8B, 131072, PrefillConfig(keep_rate=0.1, **options))  # type: ignore[arg-type]

    dense, windowed, exits, both, bm25 = (
        gain(),
        gain(draft_window=256),
        gain(scoring_heads=((7, 0),)),
        gain(draft_window=256, scoring_heads=((7, 0),)),
        gain(scorer="bm25"),
    )
    assert dense < windowed < both < bm25
    assert dense < exits < both
    assert gain(draft_window=(1 << 20, 256)) == dense
    assert gain(draft_window=(0, 256)) == windowed


def test_the_draft_s_last_layer_counts_its_queries_keys_and_values_alone() -> None:
    draft, config = Shape(3, 8, 24, 4, 2, 50), PrefillConfig(keep_rate=0.9)
    own = Shape(2, 8, 24, 4, 2, 50)
    queries, keys, values = 100 * 8**2, 100 * 8 * 4, 100 * 8 * 4
    counted = prefill_flops(own, 100) - 100 * 8 * 50 + queries + keys + values
    whole, kept = prefill_flops(LLAMA_8B, 100), prefill_flops(LLAMA_8B, 90)
    assert expected_gain(LLAMA_8B, draft, 100, config) == pytest.approx(whole / (counted + kept))


def _config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
    )


def test_shapes_are_taken_from_configurations_and_refused_where_they_say_too_little() -> None:
    assert Shape.of(_config_of(LLAMA_8B)) == LLAMA_8B
    with pytest.raises(ValueError, match="no cost model"):
        Shape.of(Mamba2Config())


def test_sparse_prefill_pays_from_a_length_on_that_what_is_cheaper_lowers() -> None:
    default, bm25 = PrefillConfig(), PrefillConfig(scorer="bm25", look_ahead=0)
    assert 96 < counted_break_even(LLAMA_405B, LLAMA_8B, default) < 32768
    assert counted_break_even(LLAMA_70B, LLAMA_8B, bm25) <= counted_break_even(LLAMA_70B, LLAMA_8B, default)
    # A draft as dear as its target never pays.
    assert counted_break_even(LLAMA_8B, LLAMA_8B, default) == 0


QWEN_05B, QWEN_15B = Shape(24, 896, 4864, 14, 2, 151936), Shape(28, 1536, 8960, 12, 2, 151936)
LLAMA_1B, QWEN_32B = Shape(16, 2048, 8192, 32, 8, 128256), Shape(64, 5120, 27648, 40, 8, 152064)


@pytest.mark.parametrize(
    ("target", "draft", "loses_at", "gains_at"),
    [(QWEN_15B, QWEN_05B, 2048, 32768), (LLAMA_8B, LLAMA_1B, 512, 8192), (QWEN_32B, LLAMA_1B, 64, 2048)],
)
def test_on_a_gpu_short_prompts_of_small_targets_do_not_pay(
    target: Shape, draft: Shape, loses_at: int, gains_at: int
) -> None:
    """The launches of two models take longer than a small target's whole prefill (LOG.md, "On one H100")."""
    config = PrefillConfig(keep_rate=0.1)
    assert loses_at < counted_break_even(target, draft, config, on_gpu=True) <= gains_at
    assert counted_break_even(target, draft, config) < counted_break_even(target, draft, config, on_gpu=True)


@pytest.mark.parametrize(
    ("options", "num_forwards"),
    [
        ({}, 1),
        ({"draft_window": 512}, 2),
        ({"draft_window": (8192, 512)}, 1),
        ({"scoring_queries": "look_ahead", "look_ahead": 8}, 10),
        ({"scorer": "bm25"}, 1),
    ],
)
def test_the_queries_have_forwards_of_their_own_only_behind_a_window_or_in_a_look_ahead(
    options: dict[str, Any], num_forwards: int
) -> None:
    """At the break-even of this pair on a GPU all forwards but the dense one are bound by their launches."""
    even = counted_break_even(LLAMA_8B, LLAMA_1B, PrefillConfig(keep_rate=0.1, **options), on_gpu=True)
    sparse = LAUNCHES_PER_LAYER * (LLAMA_8B.num_layers + num_forwards * LLAMA_1B.num_layers)
    assert prefill_flops(LLAMA_8B, round(even / 1.1)) < sparse < prefill_flops(LLAMA_8B, even)


def test_a_threshold_rises_to_the_break_even_unless_it_was_given() -> None:
    pair = _config_of(QWEN_15B), _config_of(QWEN_05B)
    default = PrefillConfig(keep_rate=0.1)
    assert with_threshold(default, *pair) == default
    raised = with_threshold(default, *pair, on_gpu=True)
    assert raised.min_prompt_tokens == counted_break_even(QWEN_15B, QWEN_05B, default, on_gpu=True) > 2048
    given = PrefillConfig(keep_rate=0.1, min_prompt_tokens=100)
    assert with_threshold(given, *pair, on_gpu=True) == given
    assert with_threshold(default, Mamba2Config(), pair[1], on_gpu=True) == default
    twins = [_config_of(LLAMA_8B)] * 2
    assert with_threshold(PrefillConfig(), *twins).min_prompt_tokens > 1 << 20
