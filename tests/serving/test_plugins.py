"""A rule and a policy of the user's own module, on a server: the page "Add a selection rule", followed to its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.pages import ROOT, blocks

from .conftest import Reference

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


def test_a_rule_and_a_policy_of_ones_own_module_work_on_a_server(
    launch: Any, reference: Reference, tmp_path: Path, monkeypatch: Any
) -> None:
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (registers,) = [block for block in blocks(PAGE) if block.title.startswith("rare_words.py")]
    (tmp_path / "rare_words.py").write_text(rule.code + registers.code + POLICY, encoding="utf-8")
    settings = tmp_path / "settings.json"
    prefill = {"scorer": "rare_words", "keep_rate": 0.3, "on_scoring_error": "raise"}
    settings.write_text(json.dumps({"prefill": prefill, "policy": "twos", "calibration": "none"}), encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    plugins = {"PYTHONPATH": path, "SPEC_STACK_PLUGINS": "rare_words", "SPEC_STACK_SGLANG": "{}"}
    server = launch("--max-total-tokens", "8000", "--spec-stack-config", str(settings), environment=plugins)
    lines = [f"def step_{number}(value):\n    return value + {number}\n" for number in range(40)]
    lines[17] = "LANTERN_WATTS = 60\n"
    prompt = reference.tokenizer("".join(lines) + "\n# What is LANTERN_WATTS?\n").input_ids
    reply = server.generate(prompt, sparse_prefill="on", explain=True)
    info = reply["meta_info"]["spec_stack"]
    server.stop()
    kept = [position for start, stop in info["kept_spans"] for position in range(start, stop)]
    assert kept == _selected_by(tmp_path, monkeypatch, reference, prompt)
    assert "LANTERN_WATTS = 60" in reference.tokenizer.decode([prompt[position] for position in kept])
    # The rule asks no draft.
    assert (info["sparse_prefill"], info["num_draft_tokens"]) == (True, 0)
    assert (info["policy"], set(info["gamma_trace"])) == ("twos", {2})
    assert reply["output_ids"] == reference.tokens_over(prompt, info["kept_spans"], len(reply["output_ids"]))


def _selected_by(folder: Path, monkeypatch: Any, reference: Reference, prompt: list[int]) -> list[int]:
    """What the same module's rule keeps of the prompt in this process."""
    from spec_stack.config import PrefillConfig
    from spec_stack.prefill.rule import Evidence
    from spec_stack.prefill.selection import select
    from spec_stack.settings.plugins import ENVIRONMENT, import_plugins
    from spec_stack.tokenizers.pieces import Pieces

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(ENVIRONMENT, "rare_words")
    import_plugins()
    evidence = Evidence(prompt, pieces=Pieces(reference.tokenizer).of(prompt))
    return list(select(evidence, PrefillConfig(scorer="rare_words", keep_rate=0.3)).positions)
