"""A server's settings, and the versions of SGLang. No SGLang here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.controller.base import StepContext
from spec_stack.controller.registry import BATCH_POLICIES
from spec_stack.sglang import launch, plugin
from spec_stack.sglang.server_args import ENVIRONMENT, ServerConfig, add_flags


@pytest.mark.parametrize("policy", BATCH_POLICIES)
@pytest.mark.parametrize("gammas", [(0, 1, 2, 4, 8), (3,), (0, 2), (16,)])
def test_every_policy_for_batches_is_made_from_any_gammas(policy: str, gammas: tuple[int, ...]) -> None:
    made = ServerConfig(policy=policy, gammas=gammas).make_policy(policy)
    context = StepContext(0, gammas[-1], None, "fp32", batch_size=2)
    assert 0 <= made.choose(context) <= gammas[-1]
    assert policy in made.name


def test_flags_reach_another_process_through_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{}")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"keep_rate": 0.5, "policy": "ema", "prefill": {"chunk_size": 16}}))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    namespace = parser.parse_args(["--spec-stack-config", str(path), "--spec-stack-keep-rate", "0.1"])
    assert vars(namespace) == {}
    parser.parse_args(["--spec-stack-gammas", "0", "4", "--spec-stack-min-prompt-tokens", "77"])
    config = ServerConfig.from_environment()
    assert (config.prefill.keep_rate, config.prefill.chunk_size, config.prefill.min_prompt_tokens) == (0.1, 16, 77)
    assert (config.policy, config.gammas) == ("ema", (0, 4))


@pytest.mark.parametrize(
    ("value", "named"),
    [("{", ENVIRONMENT), ("[]", ENVIRONMENT), ("3", ENVIRONMENT), ('{"config": "/nowhere.json"}', "/nowhere.json")],
)
def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch, value: str, named: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(ValueError, match=named):
        ServerConfig.from_environment()


@pytest.mark.parametrize(
    "found", ["0.5.19", "0.6.0", "0.5.22.post1", "0.5.23.post1", "0.5.24", "0.5.24rc1", "1.0", "0.5.post1"]
)
def test_a_version_of_sglang_out_of_range_ends_a_launch_that_asks_for_the_algorithm(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    for flags in (
        ["--speculative-algorithm", "spec_stack"],
        ["--speculative-algorithm=SPEC_STACK"],
        ["--spec-stack-scoring-model=draft"],
    ):
        monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
        with pytest.raises(SystemExit, match=f"0.5.20 to 0.5.23, and this is {found}"):
            plugin.register()
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "spec_stack/assets/target"])
    with pytest.raises(RuntimeError, match="install one of those"):
        plugin.register()


@pytest.mark.parametrize("found", ["0.5.20", "0.5.21", "0.5.22", "0.5.23", "0.5.23+cu130"])
def test_the_versions_that_ran_pass(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    plugin.check_version()


@pytest.mark.parametrize("found", ["0.5.24", "0.5.24rc1", "0.6.0", "1.0"])
def test_a_newer_version_is_tried_on_request_and_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    with pytest.raises(RuntimeError, match="or set SPEC_STACK_ALLOW_UNTESTED=1 to try"):
        plugin.check_version()
    monkeypatch.setenv(plugin.ALLOW_UNTESTED, "1")
    plugin.check_version()
    assert "WHICH NO TEST HAS SEEN" in caplog.text
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.19")
    with pytest.raises(RuntimeError, match=r"install one of those$"):
        plugin.check_version()


def test_a_draft_gets_slots_of_its_own_where_it_can_read_them() -> None:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]), hf_text_config=SimpleNamespace()
    )
    sliding = SimpleNamespace(hf_config=model.hf_config, hf_text_config=SimpleNamespace(sliding_window=4096))
    launch.require_slots(SimpleNamespace(page_size=1), model)
    for args, draft, said in (
        (SimpleNamespace(page_size=16), model, "--page-size 1"),
        (SimpleNamespace(page_size=None, enable_hierarchical_cache=True), model, "--enable-hierarchical-cache"),
        (SimpleNamespace(), sliding, "sliding-window"),
    ):
        with pytest.raises(ValueError, match=said):
            launch.require_slots(args, draft)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"speculative_num_steps": 8, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 9}, None),
        ({"speculative_draft_model_path": None}, "add --speculative-draft-model-path"),
        ({"scoring_model": "draft"}, "SPEC_STACK scores with its draft"),
        ({"speculative_num_steps": 3}, "leave --speculative-num-steps out"),
        ({"speculative_eagle_topk": 4}, "leave --speculative-eagle-topk out"),
        ({"speculative_num_draft_tokens": 4}, "leave --speculative-num-draft-tokens out"),
        ({"speculative_adaptive": True}, "--speculative-adaptive is set; leave it out"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling is set"),
        # As any launch.
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num .*spec-stack proxy"),
        ({"enable_memory_saver": True}, "add --enable-draft-weights-cpu-backup"),
        ({"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True}, None),
    ],
)
def test_drafting_says_what_it_cannot_work_with(changed: dict[str, Any], said: str | None) -> None:
    names = ("num_steps", "eagle_topk", "num_draft_tokens", "adaptive", "use_rejection_sampling")
    plain = {"speculative_draft_model_path": "draft", "enable_dp_attention": False, "pp_size": 1}
    plain |= {"enable_memory_saver": False, "enable_draft_weights_cpu_backup": False}
    plain |= {f"speculative_{name}": False if name in names[3:] else None for name in names}
    args, config = SimpleNamespace(**{**plain, **changed}), ServerConfig(scoring_model=changed.get("scoring_model"))
    if said is None:
        launch.require_drafting(args, config)
        return
    with pytest.raises(ValueError, match=said):
        launch.require_drafting(args, config)


@pytest.mark.parametrize("field", ["linear_num_key_heads", "mamba_d_state"])
def test_a_draft_with_a_recurrent_state_is_left_to_the_proxy(field: str) -> None:
    launch.require_no_state(SimpleNamespace(model_type="llama"))
    with pytest.raises(ValueError, match="spec-stack proxy --draft"):
        launch.require_no_state(SimpleNamespace(**{"model_type": "mixed", field: 4}))
