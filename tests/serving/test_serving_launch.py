"""Launches that are refused, with the reason, and pairs with padded embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import ASSETS, Reference, generate_body

_ACCEPTED: dict[str, Any] = {
    "speculative_draft_model_path": "draft",
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_adaptive": False,
    "enable_dp_attention": False,
    "pp_size": 1,
    "speculative_use_rejection_sampling": False,
    "enable_memory_saver": False,
}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"speculative_num_steps": 3}, "leave --speculative-num-steps out"),
        ({"speculative_eagle_topk": 4}, "leave --speculative-eagle-topk out"),
        ({"speculative_num_draft_tokens": 4}, "leave --speculative-num-draft-tokens out"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"pp_size": 2}, "--pp-size"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    from sglang.srt.plugins import load_plugins

    from spec_stack.sglang.hooks import validate

    load_plugins()

    validate(SimpleNamespace(**_ACCEPTED))
    with pytest.raises(ValueError, match=named):
        validate(SimpleNamespace(**{**_ACCEPTED, **arguments}))


def padded(model: Path, folder: Path, num_rows: int, factor: float) -> Path:
    """A copy of a model whose embeddings have rows more that no tokenizer makes an id for, factor times the first."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.shape[0] == config["vocab_size"]:
            weights[name] = torch.cat([weight, factor * weight[:1].expand(num_rows, -1)]).contiguous()
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + num_rows}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("wider", ["target", "draft"])
def test_a_pair_with_one_tokenizer_and_padded_embeddings_starts(
    launch: Any, reference: Reference, tmp_path: Path, wider: str
) -> None:
    """A padded draft would propose nothing else than its surplus ids, were they not cut; a padded target's are read."""
    num_ids = reference.generator.target.config.vocab_size
    models = {wider: padded(ASSETS / wider, tmp_path / wider, 64, factor=9 if wider == "draft" else 0)}
    server = launch("--max-total-tokens", "8000", **models)
    prompt = reference.prompt(300, seed=8)
    reply = server.generate(prompt, 40, gamma=4)
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=40)
    assert reply["meta_info"]["spec_stack"]["num_accepted"] > 5
    if wider == "target":
        assert server.post("/generate", generate_body([*prompt, num_ids + 20], 4, gamma=4))[0] == 200
    assert server.is_alive
    server.stop()


def test_a_server_without_the_plugins_hooks_refuses_to_start(launch: Any) -> None:
    """The test support puts one hook out of action, as a failed import would."""
    server = launch(wait=False, environment={"SPEC_STACK_TEST_BREAK_HOOK": "1"})
    assert server.exit_code() != 0
    assert "SPEC_STACK cannot serve: SGLang did not apply its hooks on" in server.log.read_text()
