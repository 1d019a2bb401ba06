"""What a scoring model may run with. No SGLang here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.config import PrefillConfig
from spec_stack.sglang.launch import Launch, pruning_refusal, require_scoring, untested_refusal
from spec_stack.sglang.server_args import ServerConfig


def _model(context_len: int = 4096, architecture: str = "LlamaForCausalLM", is_generation: bool = True) -> Any:
    return SimpleNamespace(
        context_len=context_len,
        is_generation=is_generation,
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(),
    )


def _args(**changed: Any) -> Any:
    return SimpleNamespace(**{"pp_size": 1, "enable_dp_attention": False, "dllm_algorithm": None, **changed})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
def test_a_model_scores_for_a_target_of_any_architecture(architecture: str) -> None:
    args = _args(enable_hierarchical_cache=True, kv_cache_dtype="fp4_e2m1")
    require_scoring(args, _model(architecture=architecture), _model())


@pytest.mark.parametrize(
    ("args", "target", "named"),
    [
        ({"pp_size": 2}, {}, "--pp-size"),
        ({"enable_dp_attention": True}, {}, "--enable-dp-attention"),
        ({"attn_dp_size": 2}, {}, "--attn-dp-size"),
        ({"attn_cp_size": 2}, {}, "--attn-cp-size"),
        ({"dllm_algorithm": "LowConfidence"}, {}, "--dllm-algorithm"),
        ({"disaggregation_mode": "prefill"}, {}, "different servers"),
        ({"tokenizer_worker_num": 2}, {}, "the workers of --tokenizer-worker-num"),
        ({"grpc_mode": True}, {}, "--grpc-mode"),
        ({"smg_grpc_mode": True}, {}, "--smg-grpc-mode"),
        ({"enable_lmcache": True}, {}, "--enable-lmcache looks up the KV of a whole prompt before it is pruned"),
        ({"hicache_storage_backend": "file"}, {}, "--hicache-storage-backend looks up"),
        ({}, {"is_generation": False}, "does not generate"),
        ({}, {"context_len": 8192}, "add --context-length 4096"),
    ],
)
def test_what_a_model_cannot_score_for_is_refused_by_name(
    args: dict[str, Any], target: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        require_scoring(_args(**args), _model(**target), _model())


def test_sglangs_rust_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "true")
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER"):
        require_scoring(_args(), _model(), _model())


@pytest.mark.parametrize(
    ("architecture", "text", "said"),
    [
        ("Qwen3ForCausalLM", {}, None),
        ("MistralForCausalLM", {"sliding_window": 4096}, "the draft has sliding-window layers"),
        ("Phi3ForCausalLM", {"rope_scaling": {"rope_type": "longrope"}}, "the draft uses 'longrope' rotary angles"),
        ("GPT2LMHeadModel", {}, "the draft is a GPT2LMHeadModel"),
    ],
)
def test_a_draft_whose_attention_the_scoring_lacks_prunes_nothing(
    architecture: str, text: dict[str, Any], said: str | None
) -> None:
    draft = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]), hf_text_config=SimpleNamespace(**text)
    )
    refusal = pruning_refusal(_args(), draft)
    assert refusal is None if said is None else said in (refusal or "")


@pytest.mark.parametrize(
    ("architecture", "args"),
    [
        ("DeepseekV3ForCausalLM", {}),
        ("LlamaForCausalLM", {"enable_hierarchical_cache": True}),
        ("LlamaForCausalLM", {"kv_cache_dtype": "fp4_e2m1"}),
        ("LlamaForCausalLM", {"dcp_size": 2}),
    ],
)
def test_what_no_test_covers_is_pruned_on_request_alone(architecture: str, args: dict[str, Any]) -> None:
    target = _model(architecture=architecture)
    assert "sparse-prefill on" in (untested_refusal(_args(**args), target, ServerConfig()) or "")
    assert untested_refusal(_args(**args), target, ServerConfig(prefill=PrefillConfig(sparse_prefill="on"))) is None
    assert untested_refusal(_args(), _model(architecture="Gemma3ForCausalLM"), ServerConfig()) is None


def test_a_scoring_model_that_sglang_cannot_run_is_left_to_the_proxy() -> None:
    config = ServerConfig(scoring_model="draft.gguf")
    with pytest.raises(ValueError, match=r"draft.gguf: it is a GGUF file; spec-stack proxy --draft"):
        Launch.scoring("", _args(), _model(), None, config)
