"""A change of selection may not lose more than its noise."""

from __future__ import annotations

import json

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.prefill.registry import SCORERS
from spec_stack.prefill.rule import ScoringInputs, SelectionRule
from spec_stack.prefill.segments import Segments
from tests.fidelity.gate import EXPECTED, increase, losses, measure

# Rounding of the recorded losses, and of sums in another order.
NOISE = 1e-3


class RandomLines(SelectionRule):
    needs_attention = False

    def score(self, evidence: ScoringInputs, units: Segments, config: PrefillConfig) -> torch.Tensor:
        return torch.rand(len(units), generator=torch.Generator().manual_seed(len(units)))


@pytest.fixture(scope="module")
def calibrated() -> SpecStackGenerator:
    return SpecStackGenerator.from_pretrained(device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    found: list[float] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found


def test_selection_loses_no_more_than_recorded(calibrated: SpecStackGenerator, expected: list[float]) -> None:
    report = measure(calibrated)
    assert len(report.prompts) == 20
    more = increase(losses(report), expected)
    assert more.low <= NOISE, f"{more.value:+.3f} nats/token [{more.low:+.3f}, {more.high:+.3f}] more than recorded"


@pytest.mark.nightly
def test_a_worse_rule_fails_the_gate(
    calibrated: SpecStackGenerator, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCORERS, "random_lines", RandomLines)
    more = increase(losses(measure(calibrated, "random_lines", 10)), expected[:10])
    assert more.low > NOISE, more
