"""Predictors trained for a pair are found by the policies that use them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.policies.estimators import make_estimator, save_predictor
from spec_stack import SpecStackGenerator
from spec_stack.bench.training import as_network, step_examples
from spec_stack.controller.predictor import FILE_NAME, STEP_FEATURES, load_step_predictor
from spec_stack.controller.registry import POLICIES, make_policy
from spec_stack.controller.speckv import SHIPPED
from spec_stack.hf import loading

OPTIONS = {"max_tokens": 60, "ignore_eos": True}
PROMPT = "def read_lines(path):\n    "


@pytest.fixture
def trained(embedded: SpecStackGenerator, tmp_path: Path) -> Path:
    """A copy of the pair's draft, beside it a ridge trained on a few steps of the pair itself."""
    records = []
    for gamma in (2, 8):
        result = embedded.generate(PROMPT, gamma=gamma, return_records=True, **OPTIONS)
        records += result.records or []
    inputs, rates, _ = step_examples(records)
    folder = tmp_path / "draft"
    shutil.copytree(loading.ASSETS / "draft", folder)
    save_predictor(
        folder / FILE_NAME, as_network(make_estimator("ridge").fit(inputs, rates)), {"features": STEP_FEATURES}
    )
    return folder / FILE_NAME


@pytest.mark.slow
def test_a_pair_finds_the_predictor_beside_its_draft(trained: Path) -> None:
    target = loading.ASSETS / "target"
    generator = SpecStackGenerator.from_pretrained(target, trained.parent, device="cpu", precision="fp32")
    assert generator.pair.predictors == {"speckv": trained}
    assert generator.generate(PROMPT, policy="speckv", **OPTIONS).metrics.policy == "speckv"


@pytest.mark.slow
def test_loaded_models_use_the_shipped_predictor_unless_told(trained: Path, embedded: SpecStackGenerator) -> None:
    assert loading.find_predictors("org/big") == {}
    models = embedded.target, embedded.draft, embedded.tokenizer
    plain = SpecStackGenerator(*models)
    assert plain.pair.predictors == {}
    # Live, seconds decide too; by the paper's objective the predictor alone does, so it shows in the gammas.
    policies = [make_policy("speckv", objective="per_step", predictor=file) for file in (trained, trained, SHIPPED)]
    results = [plain.generate(PROMPT, policy=policy, proposer="model", **OPTIONS) for policy in policies]
    traces = [result.metrics.gamma_trace for result in results]
    assert traces[0] == traces[1] != traces[2]


def test_a_bad_predictor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(ValueError, match="not a predictor file"):
        make_policy("speckv", predictor=tmp_path / "step.json")


def test_what_the_package_ships_can_be_used() -> None:
    shipped = loading.find_predictors(loading.ASSETS / "draft")
    assert set(shipped) == {"speckv"} <= set(POLICIES)
    for file in shipped.values():
        assert len(load_step_predictor(file).weights) == 2
