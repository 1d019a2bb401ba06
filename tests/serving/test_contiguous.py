"""A pruned prompt is an ordinary, shorter one, for any architecture: against plain Transformers over its tokens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, StableLmConfig

from tests.support.nightly import others_nightly

from .conftest import ASSETS, Reference, Server

_SIZES = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CONFIGS: dict[str, Any] = {
    # Windows in every other layer, far shorter than the kept tokens.
    "sliding windows": lambda vocab_size: Gemma3TextConfig(
        **_SIZES,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "learned positions": lambda vocab_size: GPT2Config(
        **_SIZES, vocab_size=vocab_size, n_positions=2048, n_embd=64, n_layer=2, n_head=4
    ),
    "another one": lambda vocab_size: StableLmConfig(
        **_SIZES,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ),
}


def _report(reply: dict[str, Any]) -> dict[str, Any]:
    return dict(reply["meta_info"]["spec_stack"])


def _positions(reply: dict[str, Any]) -> list[int]:
    return [position for start, stop in _report(reply)["kept_spans"] for position in range(start, stop)]


def _kept(prompt: Sequence[int], reply: dict[str, Any]) -> list[int]:
    return [prompt[position] for position in _positions(reply)]


def _document(reference: Reference, num_tokens: int, seed: int) -> list[int]:
    """A prompt that shares no beginning with any other test's."""
    return [*random.Random(seed).choices(range(100, 1000), k=4), *reference.prompt(num_tokens, seed)]


@pytest.mark.parametrize("keep_rate", [0.1, 0.4])
def test_the_tokens_are_those_over_the_kept_tokens_as_a_prompt(
    server: Server, reference: Reference, keep_rate: float
) -> None:
    prompt = _document(reference, 900, 1901)
    reply = server.generate(prompt, sparse_prefill="on", keep_rate=keep_rate, explain=True)
    kept = _kept(prompt, reply)
    assert len(kept) < len(prompt)
    assert reply["output_ids"] == reference.tokens(kept)
    assert reply["meta_info"]["prompt_tokens"] == _report(reply)["num_prompt_tokens"] == len(prompt)


def test_a_later_turn_reuses_the_kept_prefix_and_recalls_in_order(server: Server, reference: Reference) -> None:
    prompt = _document(reference, 1300, 1902)
    asked = {"explain": True, "follow_up": "recall"}
    first = server.generate(prompt, 12, sparse_prefill="on", **asked)
    history, before = [*prompt, *first["output_ids"]], _positions(first)
    num_recalled = 0
    for turn in range(3):
        history = [*history, *reference.user_turn(30, seed=1910 + turn)]
        reply = server.generate(history, 12, **asked)
        report, positions = _report(reply), _positions(reply)
        num_recalled += report["num_recalled_tokens"]
        assert positions == sorted(positions)
        assert set(before) <= set(positions)
        assert reply["output_ids"] == reference.tokens(_kept(history, reply), max_new_tokens=12)
        first_recalled = next(
            (at for at, (old, new) in enumerate(zip(before, positions, strict=False)) if old != new), None
        )
        num_shared = len(before) if first_recalled is None else first_recalled
        assert reply["meta_info"]["cached_tokens"] >= num_shared - 1
        before = positions
        history += reply["output_ids"]
    assert num_recalled


def _saved(kind: str, folder: Path, vocab_size: int) -> Path:
    """A random model far from uniform attention, with the embedded tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(_CONFIGS[kind](vocab_size), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "target" / file, folder)
    return folder


def _greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    return [int(token_id) for token_id in output[0, len(token_ids) :]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_nightly(_CONFIGS, usual=["sliding windows"]))
def test_a_target_of_another_architecture_is_pruned(
    launch: Any, reference: Reference, tmp_path: Path, kind: str
) -> None:
    """A plain draft scores; plain decoding, and the turn after reuses what was kept."""
    folder = _saved(kind, tmp_path / "model", reference.generator.target.config.vocab_size)
    server = launch(
        *("--max-total-tokens", "6000", "--chunked-prefill-size", "128", "--context-length", "2048"),
        beside=(),
        target=folder,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    prompt = _document(reference, 700, 1920)
    dense = server.generate(prompt, 12, sparse_prefill="off")
    assert dense["output_ids"] == _greedy(model, prompt, 12), "SGLang's own model is not Transformers'"
    asked = {"explain": True, "keep_rate": 0.3, "follow_up": "recall"}
    reply = server.generate(prompt, 12, sparse_prefill="on", **asked)
    assert reply["output_ids"] == _greedy(model, _kept(prompt, reply), 12)
    history = [*prompt, *reply["output_ids"], *reference.user_turn(30, seed=1921)]
    second = server.generate(history, 12, **asked)
    assert second["output_ids"] == _greedy(model, _kept(history, second), 12)
    assert not server.state()["num_failures"]
    server.stop()
