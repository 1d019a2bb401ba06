"""What the doctor says of a launch that is resolved. No SGLang here, and no server."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.sglang.draft_kv_rows import num_row_slots
from spec_stack.sglang.launch import Launch, as_text, check_launch, describe
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
        vocab_size=151_936,
        context_len=40_960,
        get_num_kv_heads=lambda tp_size: 8 // tp_size,
        get_default_sampling_params=lambda: sampling or {},
    )


def _args(**changed: Any) -> Any:
    sizes = {"max_running_requests": 48, "tp_size": 1, "device": "cuda"}
    backends = {"attention_backend": "fa3", "decode_attention_backend": None, "disable_radix_cache": False}
    return SimpleNamespace(**{**sizes, **backends, **changed})


def _described(sizes: list[int] | None = None, **changed: Any) -> dict[str, Any]:
    launch = Launch("SPEC_STACK", _args(), _model(36), _model(28), ServerConfig(), refusal=None)
    return describe(replace(launch, **changed), "", sizes)


def test_a_launch_takes_its_pool_and_graphs() -> None:
    """The largest gamma is captured for all batches, and the others for those that may meet them."""
    # SGLang's own sizes for 48 running requests under speculation.
    found = _described(sizes=[*range(1, 9), *range(10, 33, 2), 40, 44, 48])
    assert found["vocabularies"] == "151936 embedding rows in both"
    assert found["draft's pool"].startswith(f"65536 tokens of {2 * 2 * 8 * 128 * 28} bytes")
    assert found["CUDA graphs"].startswith(f"{23 * (2 + 2 + 3 + 3) + 20 * 3} in all: ")
    assert "gamma 4 for 20 batch sizes up to 32" in found["CUDA graphs"]
    assert found["CUDA graphs"].endswith("gamma 8 for 23 batch sizes up to 48")
    assert found["warnings"] == []
    assert _described()["CUDA graphs"] == "none"


@pytest.mark.parametrize("given", [None, 20_000])
def test_each_rank_takes_its_part_of_the_drafts_pool(given: int | None) -> None:
    note = _described(args=_args(tp_size=4), config=ServerConfig(draft_pool_tokens=given))["draft's pool"]
    num_tokens, num_bytes = given or 65_536, 2 * 2 * 8 * 128 * 28 // 4
    assert note.startswith(
        f"{num_tokens} tokens of {num_bytes} bytes, {num_tokens * num_bytes / 1e9:.2f} GB on each rank"
    )
    assert ("a tenth of the memory" in note) == (given is None)


@pytest.mark.parametrize(
    ("num_tokens", "shortest"), [(5_000, 4_680), (200, 0), (41_279, 40_959), (41_280, None), (None, None)]
)
def test_a_pool_smaller_than_a_prompt_with_its_queries_is_a_warning_with_its_flag(
    num_tokens: int | None, shortest: int | None
) -> None:
    said = "\n".join(_described(config=ServerConfig(draft_pool_tokens=num_tokens))["warnings"])
    assert (f"prompts of over {shortest} tokens may be prefilled densely" in said) == (shortest is not None)
    # The queries are read again behind the longest prompt.
    flag = f"--spec-stack-draft-pool-tokens {40_960 + MOST_REPEATED} holds the longest one, in 4.73 GB"
    assert (flag in said) == (shortest is not None)


def test_a_pool_of_the_drafts_positions_is_enough() -> None:
    launch = Launch("SPEC_STACK", _args(), _model(36), _model(28), ServerConfig(draft_pool_tokens=40_960), refusal=None)
    assert describe(launch, "", None, max_positions=40_960)["warnings"] == []


def test_the_pool_holds_the_layers_that_score() -> None:
    heads = ServerConfig.from_mapping({"prefill": {"scoring_heads": [[6, 0], [3, 1]], "scoring_queries": "prompt"}})
    assert _described(config=heads)["draft's pool"].startswith(f"65536 tokens of {2 * 2 * 8 * 128 * 7} bytes")
    checked = replace(heads, prefill=replace(heads.prefill, max_dropped_attention=0.1))
    assert _described(config=checked)["draft's pool"].startswith(f"65536 tokens of {2 * 2 * 8 * 128 * 28} bytes")


def test_a_draft_over_its_own_slots_takes_those_of_all_requests() -> None:
    config = ServerConfig.from_mapping({"sparse_prefill": "draft_only", "draft_kv_budget": 256})
    found = _described(config=config)
    assert "the target prefills densely" in found["prompts"]
    num_slots = num_row_slots(config.prefill, 8)
    assert found["draft's slots"] == (
        f"the draft has {num_slots} slots of its own for each request, "
        f"{49 * num_slots * 2 * 2 * 8 * 128 * 28 / 1e9:.2f} GB in all"
    )
    assert "draft's pool" not in found


@pytest.mark.parametrize("settings", [{}, {"min_prompt_tokens": 900}])
def test_the_threshold_is_named_with_its_flag(settings: dict[str, Any]) -> None:
    said = _described(config=ServerConfig.from_mapping(settings))["prompts"]
    assert f"of those with {settings.get('min_prompt_tokens', 2048)} or more tokens" in said
    assert "--spec-stack-min-prompt-tokens" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"refusal": "the draft is a GptOssForCausalLM"}, "no prompt is pruned here, since the draft is a GptOss"),
        ({"config": ServerConfig.from_mapping({"sparse_prefill": "off"})}, "since sparse_prefill is off"),
        ({"config": ServerConfig.from_mapping({"keep_rate": 1.0})}, "since keep_rate is 1.0"),
    ],
)
def test_where_no_prompt_is_pruned_it_says_why(changed: dict[str, Any], said: str) -> None:
    found = _described(**changed)
    assert said in found["prompts"]
    assert "draft's pool" not in found


@pytest.mark.parametrize("algorithm", ["", "NGRAM"])
def test_a_scoring_model_drafts_nothing(algorithm: str) -> None:
    found = _described(algorithm=algorithm, config=ServerConfig(scoring_model="draft"))
    assert found["drafting"] == f"{algorithm or 'none'}, by SGLang itself"
    assert "CUDA graphs" not in found


@pytest.mark.parametrize("penalty", [1.05, 0.9])
def test_what_works_worse_than_it_might_is_a_warning(penalty: float) -> None:
    target = _model(36, sampling={"repetition_penalty": penalty, "top_p": 0.8})
    warnings = "\n".join(_described(target=target, args=_args(disable_radix_cache=True))["warnings"])
    for said in ("radix cache", f"repetition_penalty {penalty}", "--sampling-defaults openai"):
        assert said in warnings
    assert _described(target=_model(36, sampling={"repetition_penalty": 1.0}))["warnings"] == []


def test_text_and_json_say_the_same() -> None:
    report = {"arguments": [], "problem": None, **_described()}
    text = as_text(report)
    assert json.loads(json.dumps(report)) == report
    for name in ("prompts", "drafting", "draft's pool", "CUDA graphs"):
        assert f"{name}: {report[name]}" in text
    assert text.endswith("the server would start with these arguments")
    assert as_text({**report, "problem": "no"}).endswith("problem: no")


def test_a_python_without_sglang_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="this Python has none"):
        check_launch([])
