"""What all tests share: no network, one thread, two tiny models and the embedded pair."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from tests.support.folders import copy_draft
from tests.support.models import make_model

# How fast the machine is does not matter.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
# Tiny tensors gain nothing from threads and lose much on a busy machine.
torch.set_num_threads(1)


# Tests that took half a second of the processor or more in the last recorded run, all parameters together.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").split("\n"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what slow.txt names, so that a list is renewed and no decorator."""
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """A command that begins a server sends log lines to the standard error of its test, which is then closed."""
    loggers = [logging.getLogger(name) for name in ("spec_stack", "uvicorn", "py.warnings")]
    before = [(each, each.handlers, each.level, each.propagate) for each in loggers]
    yield
    logging.captureWarnings(False)
    for each, handlers, level, propagate in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture
def target() -> PreTrainedModel:
    return make_model(seed=1)


@pytest.fixture
def draft() -> PreTrainedModel:
    return make_model(seed=2)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a draft to change at will, both the embedded draft."""
    for role in ("target", "draft"):
        copy_draft(tmp_path / role)
    return tmp_path / "target", tmp_path / "draft"


@pytest.fixture(scope="session")
def embedded() -> SpecStackGenerator:
    """By the paper's rule. Scoring that fails is raised, so that no test passes by the dense fallback."""
    strict = SpecStackConfig(PrefillConfig(on_scoring_failure="raise"))
    return SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=strict, calibration=False)
