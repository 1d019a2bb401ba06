"""A server with a rule and a policy of the user's own module, settings from a file, and padded embeddings.

The rule is that of the page "Add a selection rule", followed to its end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.pages import ROOT, blocks

from .conftest import ASSETS, SERVE, Launcher, Reference, Server, generate_body, kept_positions

PAGE = ROOT / "docs" / "add-a-selection-rule.md"
POLICY = """
from dataclasses import dataclass

from spec_stack import Policy
from spec_stack.controller.registry import BATCH_POLICIES


@dataclass
class Twos(Policy):
    name = "twos"

    def choose(self, context):
        return 2


BATCH_POLICIES["twos"] = Twos
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the user's module."""
    folder = tmp_path_factory.mktemp("own")
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (registers,) = [block for block in blocks(PAGE) if block.title.startswith("rare_words.py")]
    (folder / "rare_words.py").write_text(rule.code + registers.code + POLICY, encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["draft", pytest.param("target", marks=pytest.mark.nightly)])
def wider(request: pytest.FixtureRequest) -> str:
    """The model with padded embeddings."""
    return str(request.param)


def _padded(model: Path, folder: Path, num_rows: int, factor: float) -> Path:
    """A copy of a model whose embeddings have rows more that no tokenizer makes an id for, factor times the first."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.shape[0] == config["vocab_size"]:
            weights[name] = torch.cat([weight, factor * weight[:1].expand(num_rows, -1)]).contiguous()
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + num_rows}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def own(launch: Launcher, folder: Path, wider: str) -> Iterator[Server]:
    """Started by `sglang serve`, by night its processes too are a user's. A flag overrides the settings file."""
    prefill = {"scorer": "rare_words", "on_scoring_failure": "raise"}
    settings = {"prefill": prefill, "keep_rate": 0.9, "min_prompt_tokens": 100, "policy": "twos", "calibration": "none"}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = launch(
        *("--max-total-tokens", "8000", "--spec-stack-config", str(folder / "settings.json")),
        *("--spec-stack-keep-rate", "0.3"),
        environment={
            **{"PYTHONPATH": path, "SPEC_STACK_PLUGINS": "rare_words", "SPEC_STACK_SGLANG": "{}"},
            "SPEC_STACK_TEST_FORK": "1" if wider == "draft" else "",
        },
        command=SERVE,
        # Were the surplus ids of a draft not cut, it would propose nothing else; those of a target are read.
        **{wider: _padded(ASSETS / wider, folder / wider, 64, factor=9 if wider == "draft" else 0)},
    )
    yield server
    server.stop()


def test_a_rule_and_a_policy_of_ones_own_module_work_on_a_server(
    own: Server, reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"def step_{number}(value):\n    return value + {number}\n" for number in range(40)]
    lines[17] = "LANTERN_WATTS = 60\n"
    prompt = reference.tokenizer("".join(lines) + "\n# What is LANTERN_WATTS?\n").input_ids
    reply = own.generate(prompt, explain=True, follow_up="afresh")
    info = reply["meta_info"]["spec_stack"]
    kept = kept_positions(reply)
    assert kept == _selected_by(folder, monkeypatch, reference, prompt)
    assert "LANTERN_WATTS = 60" in reference.tokenizer.decode([prompt[position] for position in kept])
    # The rule asks no draft.
    assert (info["sparse_prefill"], info["num_draft_tokens"]) == (True, 0)
    assert (info["policy"], set(info["gamma_trace"])) == ("twos", {2})
    assert reply["output_ids"] == reference.tokens_over(prompt, info["kept_spans"], len(reply["output_ids"]))


def test_a_flag_goes_over_the_file_and_the_file_over_defaults(own: Server) -> None:
    prefill = own.state()["settings"]["prefill"]
    assert (prefill["keep_rate"], prefill["min_prompt_tokens"], prefill["scorer"]) == (0.3, 100, "rare_words")


def test_a_pair_with_one_tokenizer_and_padded_embeddings_works(own: Server, reference: Reference, wider: str) -> None:
    prompt = reference.prompt(300, seed=8)
    reply = own.generate(prompt, 40, gamma=4, sparse_prefill="off")
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=40)
    assert reply["meta_info"]["spec_stack"]["num_accepted"] > 5
    if wider == "target":
        surplus = reference.generator.target.config.vocab_size + 20
        assert own.post("/generate", generate_body([*prompt, surplus], 4, gamma=4))[0] == 200
        assert own.is_alive


def _selected_by(folder: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference, prompt: list[int]) -> list[int]:
    """What the same module's rule keeps of the prompt in this process."""
    from spec_stack.config import PrefillConfig
    from spec_stack.prefill.prompt_text import PromptText
    from spec_stack.prefill.rule import ScoringInputs
    from spec_stack.prefill.selection import select
    from spec_stack.settings.plugins import ENVIRONMENT, import_plugins
    from spec_stack.tokenizers.vocabulary import Pieces

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(ENVIRONMENT, "rare_words")
    import_plugins()
    evidence = ScoringInputs(PromptText(prompt, Pieces(reference.tokenizer).of(prompt)))
    return list(select(evidence, PrefillConfig(scorer="rare_words", keep_rate=0.3)).positions)
