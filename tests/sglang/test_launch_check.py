"""What the doctor says of a launch that is resolved. No SGLang here, and no server."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.sglang.draft_kv_rows import num_row_slots
from spec_stack.sglang.launch_check import Launch, as_text, check_launch, describe
from spec_stack.sglang.server_args import ServerConfig


def _model(num_layers: int, architecture: str = "Qwen3ForCausalLM", sampling: dict[str, Any] | None = None) -> Any:
    """SGLang's configuration of a model with 8 key heads of 128, in two bytes."""
    return SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(),
        num_hidden_layers=num_layers,
        head_dim=128,
        v_head_dim=128,
        dtype=SimpleNamespace(itemsize=2),
        context_len=40_960,
        get_num_kv_heads=lambda tp_size: 8 // tp_size,
        get_default_sampling_params=lambda: sampling or {},
    )


def _args(**changed: Any) -> Any:
    return SimpleNamespace(
        **{
            "attention_backend": "fa3",
            "decode_attention_backend": None,
            "speculative_draft_attention_backend": None,
            "disable_radix_cache": False,
            "kv_cache_dtype": "auto",
            "max_running_requests": 48,
            "tp_size": 1,
            **changed,
        }
    )


def _launch(**changed: Any) -> Launch:
    launch = Launch(
        algorithm="SPEC_STACK",
        args=_args(),
        target=_model(36),
        small=_model(28),
        config=ServerConfig(),
        refusal=None,
        vocabularies="151936 embedding rows in both",
        sizes=[1, 2, 4, 8, 16],
    )
    return replace(launch, **changed)


def test_a_launch_takes_its_pools_and_graphs() -> None:
    found = describe(_launch())
    per_token = [2 * 2 * 8 * 128 * num_layers for num_layers in (36, 28)]
    assert found["target's pool"] == (
        f"each token takes {per_token[0]} bytes of the target and {per_token[1]} bytes of the draft on each rank"
    )
    assert found["draft's pool"].startswith(f"65536 tokens of {per_token[1]} bytes")
    assert found["CUDA graphs"].startswith(f"{5 * (2 + 2 + 3 + 3 + 3)} in all: ")
    assert found["CUDA graphs"].endswith("gamma 8 for 5 batch sizes up to 16")
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("args", "divisor"), [({"tp_size": 4}, 4), ({"kv_cache_dtype": "fp8_e4m3"}, 2), ({"kv_cache_dtype": "bf16"}, 1)]
)
def test_ranks_and_short_numbers_take_less(args: dict[str, Any], divisor: int) -> None:
    note = describe(_launch(args=_args(**args)))["target's pool"]
    assert note.startswith(f"each token takes {2 * 2 * 8 * 128 * 36 // divisor} bytes of the target")


def test_a_draft_over_its_own_slots_takes_none_of_the_targets_pool() -> None:
    config = ServerConfig.from_mapping({"sparse_prefill": "draft_only", "draft_kv_budget": 256})
    found = describe(_launch(config=config))
    assert "draft" not in found["target's pool"]
    assert "the target prefills densely" in found["prompts"]
    num_slots = num_row_slots(config.prefill, 8)
    assert found["draft's slots"] == (
        f"the draft has {num_slots} slots of its own for each request, "
        f"{49 * num_slots * 2 * 2 * 8 * 128 * 28 / 1e9:.2f} GB in all"
    )
    assert "draft's pool" not in found


@pytest.mark.parametrize("settings", [{}, {"min_prompt_tokens": 900}])
def test_the_threshold_is_named_with_its_flag(settings: dict[str, Any]) -> None:
    said = describe(_launch(config=ServerConfig.from_mapping(settings)))["prompts"]
    assert f"of those with {settings.get('min_prompt_tokens', 2048)} or more tokens" in said
    assert "--spec-stack-min-prompt-tokens" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"refusal": "the draft is a GptOssForCausalLM"},
            "no prompt is pruned here, since the draft is a GptOss",
        ),
        ({"config": ServerConfig.from_mapping({"sparse_prefill": "off"})}, "since sparse_prefill is off"),
        ({"config": ServerConfig.from_mapping({"keep_rate": 1.0})}, "since keep_rate is 1.0"),
    ],
)
def test_where_no_prompt_is_pruned_it_says_why(changed: dict[str, Any], said: str) -> None:
    found = describe(_launch(**changed))
    assert said in found["prompts"]
    assert "draft's pool" not in found


@pytest.mark.parametrize("algorithm", ["", "NGRAM"])
def test_a_scoring_model_drafts_nothing(algorithm: str) -> None:
    found = describe(_launch(algorithm=algorithm, config=ServerConfig(scoring_model="draft")))
    assert found["drafting"] == f"{algorithm or 'none'}, by SGLang itself"
    assert "draft" not in found["target's pool"]
    assert "CUDA graphs" not in found


def test_layers_that_are_not_plain_attention_are_not_estimated() -> None:
    found = describe(_launch(target=_model(36, "DeepseekV3ForCausalLM")))
    assert found["target's pool"] == "not estimated for these layers"


def test_what_works_worse_than_it_might_is_a_warning() -> None:
    target = _model(36, sampling={"repetition_penalty": 1.05})
    warnings = "\n".join(describe(_launch(target=target, args=_args(disable_radix_cache=True)))["warnings"])
    for said in ("radix cache", "repetition_penalty 1.05"):
        assert said in warnings


def test_text_and_json_say_the_same() -> None:
    report = {"arguments": [], "problem": None, **describe(_launch())}
    text = as_text(report)
    assert json.loads(json.dumps(report)) == report
    for name in ("prompts", "drafting", "target's pool", "draft's pool", "CUDA graphs"):
        assert f"{name}: {report[name]}" in text
    assert text.endswith("the server would start with these arguments")
    assert as_text({**report, "problem": "no"}).endswith("problem: no")


def test_a_python_without_sglang_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="this Python has none"):
        check_launch([])
