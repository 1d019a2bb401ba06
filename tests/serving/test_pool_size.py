"""How much memory the draft's own pool takes, on the meta device and with SGLang's own layers; no server."""

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
