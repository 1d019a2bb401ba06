"""What a scheduler makes of the draft's own pool and of bad options, with SGLang's own layers; no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


def runner_of(num_layers: int, num_kv_heads: int, head_dim: int) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [RadixAttention(8, head_dim, 1.0, num_kv_heads, layer_id=layer) for layer in range(num_layers)]
    return SimpleNamespace(model=torch.nn.ModuleList(layers), dtype=torch.bfloat16, device="meta", gpu_id=0)


def _launch(num_layers: int, num_kv_heads: int, head_dim: int, pool_tokens: int | None) -> Any:
    """A launch with the same draft by its configuration."""
    from spec_stack.sglang.launch import Launch
    from spec_stack.sglang.server_args import ServerConfig

    small = SimpleNamespace(
        **{"num_hidden_layers": num_layers, "head_dim": head_dim, "v_head_dim": head_dim, "dtype": torch.bfloat16},
        get_num_kv_heads=lambda num_ranks: num_kv_heads // num_ranks,
    )
    config, target = ServerConfig(draft_pool_tokens=pool_tokens), SimpleNamespace(context_len=4096)
    return Launch("SPEC_STACK", SimpleNamespace(tp_size=1), target, small, config, None)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the gigabytes that SGLang finds free, on one rank."""
    from spec_stack.sglang import ranks

    def publish(gigabytes: float) -> None:
        monkeypatch.setattr(ranks, "get_available_gpu_memory", lambda *args, **kwargs: gigabytes)

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
    return publish


@pytest.mark.parametrize(
    ("gigabytes", "set_to", "expected"),
    [
        # Qwen3-0.6B: 114,688 bytes a token.
        (75, None, 65_536),
        (7, None, int(0.7 * 2**30) // 114_688),
        (0.5, None, int(0.05 * 2**30) // 114_688),
        (0, None, 1),
        (7, 40_000, 40_000),
        (7, 100_000, 100_000),
    ],
)
def test_the_drafts_pool_takes_a_tenth_of_the_free_memory_at_most(
    free: Any, caplog: pytest.LogCaptureFixture, gigabytes: float, set_to: int | None, expected: int
) -> None:
    from spec_stack.sglang.scoring import draft_scorer

    free(gigabytes)
    with caplog.at_level("INFO"):
        scorer = draft_scorer(_launch(28, 8, 128, set_to), runner_of(28, 8, 128))
    assert scorer.index.num_slots == expected
    assert scorer.pool_state()["num_bytes"] == 114_688 * expected
    assert f"{expected} tokens (--spec-stack-draft-pool-tokens)" in caplog.text


def test_a_pool_that_does_not_fit_names_its_flag(free: Any) -> None:
    from spec_stack.sglang.scoring import draft_scorer

    free(7)
    # 256 TB.
    runner, launch = runner_of(2, 2, 2**20), _launch(2, 2, 2**20, 2**24)
    runner.device = "cpu"
    with pytest.raises(ValueError, match="set --spec-stack-draft-pool-tokens to fewer"):
        draft_scorer(launch, runner)


def _request(custom_params: Any) -> Any:
    """SGLang's request, as far as a decision looks at it."""
    return SimpleNamespace(
        rid="0",
        origin_input_ids=list(range(50)),
        output_ids=[],
        extra_key=None,
        cache_salt=None,
        logprob_start_len=-1,
        customized_info=None,
        sampling_params=SimpleNamespace(custom_params=custom_params, ignore_eos=False),
    )


@pytest.mark.parametrize("on_failure", ["dense", "raise"])
@pytest.mark.parametrize("custom_params", [{"spec_stack": {"gamma": 4.0}}, {"spec_stack": 3}, {"keep_rate": 0.2}])
def test_bad_options_cost_their_request_a_dense_prompt_and_never_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, custom_params: Any, on_failure: str
) -> None:
    """Under on_scoring_failure="raise" an error in scoring ends the server, and a client's mistake is none."""
    from spec_stack.sglang import ranks
    from spec_stack.sglang.draft_pool import DraftScoringRunner
    from spec_stack.sglang.errors import num_failures
    from spec_stack.sglang.launch import Launch
    from spec_stack.sglang.manager import SparsePrefillManager
    from spec_stack.sglang.scoring import DraftScorer
    from spec_stack.sglang.server_args import ServerConfig

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    settings = f'{{"calibration": "none", "prefill": {{"on_scoring_failure": "{on_failure}"}}}}'
    monkeypatch.setenv("SPEC_STACK_SGLANG", settings)
    scheduler = SimpleNamespace(
        draft_worker=None,
        model_config=SimpleNamespace(hf_eos_token_id=None),
        server_args=SimpleNamespace(chat_template=None, prefill_decode_interval=None),
        tokenizer=None,
        tree_cache=SimpleNamespace(reset=lambda: None),
        prefill_decode_interval=1,
    )
    refusal = "nothing is pruned in this test"
    args = SimpleNamespace(
        **{"decode_attention_backend": "", "attention_backend": "", "disable_radix_cache": False},
        **{"enable_metrics": False, "enable_session_radix_cache": False},
    )
    target = SimpleNamespace(vocab_size=8, context_len=4096)
    launch = Launch("", args, target, None, ServerConfig.from_environment(), refusal)
    scorer = DraftScorer(launch, DraftScoringRunner(runner_of(2, 2, 8), 100))
    manager, request, before = SparsePrefillManager(scheduler, scorer), _request(custom_params), num_failures()
    scheduler.waiting_queue = [request]
    manager.on_request(request)
    manager.step()
    assert request.customized_info["spec_stack"][0]["outcome"] == "disabled"
    assert request.origin_input_ids == list(range(50))
    assert num_failures() == before
    assert "options are left aside" in caplog.text
