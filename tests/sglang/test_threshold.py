"""From which length on prompts are pruned by default, by the sizes of both models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.config import PrefillConfig
from spec_stack.prefill.cost import NEVER, Shape, counted_break_even
from spec_stack.sglang.launch import pruning_note
from spec_stack.sglang.server_args import ServerConfig, with_calibration


def _model(num_layers: int, hidden_size: int) -> Any:
    """A text configuration of a Llama-like model."""
    return SimpleNamespace(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32_000,
    )


LARGE, SMALL = _model(32, 4096), _model(16, 1024)


def _threshold(target: Any, draft: Any, **settings: Any) -> int:
    config = ServerConfig.from_mapping({"calibration": "none", **settings})
    return with_calibration(config, "draft", target, draft).prefill.min_prompt_tokens


@pytest.mark.parametrize("target", [LARGE, SimpleNamespace(n_embd=64)], ids=["large", "no cost model"])
def test_a_small_draft_leaves_the_default(target: Any) -> None:
    assert _threshold(target, SMALL) == ServerConfig().prefill.min_prompt_tokens


def test_a_pair_that_gains_on_long_prompts_alone_prunes_those() -> None:
    draft = _model(32, 3072)
    even = counted_break_even(Shape.of(LARGE), Shape.of(draft), PrefillConfig(keep_rate=0.5))
    assert even > 2048
    assert _threshold(LARGE, draft, keep_rate=0.5) == even


def test_launches_of_kernels_count_on_a_gpu() -> None:
    """Of a target this small, prompts of 2K take no longer than its launches."""
    target, draft = _model(24, 512), _model(8, 256)
    config = ServerConfig(calibration="none")
    lengths = [with_calibration(config, "draft", target, draft, gpu).prefill.min_prompt_tokens for gpu in (False, True)]
    assert lengths[0] == 2048 < lengths[1]


def test_a_draft_as_large_as_its_target_prunes_on_request_alone() -> None:
    config = with_calibration(ServerConfig(calibration="none"), "draft", SMALL, LARGE)
    assert config.prefill.min_prompt_tokens == NEVER
    assert "pruned on request alone" in pruning_note(config, None, "")


@pytest.mark.parametrize("settings", [{"min_prompt_tokens": 900}, {"sparse_prefill": "off"}, {"keep_rate": 1.0}])
def test_what_was_given_or_is_not_pruned_keeps_its_length(settings: dict[str, Any]) -> None:
    assert _threshold(SMALL, LARGE, **settings) == ServerConfig.from_mapping(settings).prefill.min_prompt_tokens


def test_a_rule_without_a_draft_pays_however_large_the_draft_is() -> None:
    assert _threshold(SMALL, LARGE) == NEVER
    assert _threshold(LARGE, LARGE, prefill={"scorer": "bm25"}) < NEVER
