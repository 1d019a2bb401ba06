"""Predictors trained for a pair are found by the policies that use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.controller.predictor import FILE_NAME, load_step_predictor
from spec_stack.controller.registry import POLICIES, make_policy
from spec_stack.controller.speckv import SHIPPED
from spec_stack.hf import loading

OPTIONS = {"max_tokens": 60, "ignore_eos": True}
PROMPT = "def read_lines(path):\n    "


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A predictor that expects every token to be accepted, beside a copy of the pair's draft."""
    file = shutil.copytree(loading.ASSETS / "draft", tmp_path / "draft") / FILE_NAME
    content = json.loads(file.read_text())
    content["layers"][-1]["bias"] = [9.0]
    file.write_text(json.dumps(content))
    return file


@pytest.mark.slow
def test_a_pair_finds_the_predictor_beside_its_draft(other: Path) -> None:
    target = loading.ASSETS / "target"
    generator = SpecStackGenerator.from_pretrained(target, other.parent, device="cpu", precision="fp32")
    assert generator.pair.predictors == {"speckv": other}
    assert generator.generate(PROMPT, policy="speckv", **OPTIONS).metrics.policy == "speckv"


@pytest.mark.slow
def test_loaded_models_use_the_shipped_predictor_unless_told(other: Path, embedded: SpecStackGenerator) -> None:
    assert loading.find_predictors("org/big") == {}
    models = embedded.target, embedded.draft, embedded.tokenizer
    plain = SpecStackGenerator(*models)
    assert plain.pair.predictors == {}
    # Live, seconds decide too; by the paper's objective the predictor alone does, so it shows in the gammas.
    policies = [make_policy("speckv", objective="per_step", predictor=file) for file in (other, other, SHIPPED)]
    results = [plain.generate(PROMPT, policy=policy, proposer="model", **OPTIONS) for policy in policies]
    traces = [result.metrics.gamma_trace for result in results]
    assert traces[0] == traces[1] != traces[2]


def test_what_the_package_ships_can_be_used() -> None:
    shipped = loading.find_predictors(loading.ASSETS / "draft")
    assert set(shipped) == {"speckv"} <= set(POLICIES)
    for file in shipped.values():
        assert len(load_step_predictor(file).weights) == 2
