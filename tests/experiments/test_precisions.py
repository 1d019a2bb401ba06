"""Texts of several precisions are compared on the prompts that all of them have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.policies.precisions import read_common, runs_of, told_of, with_interval
from tests.experiments.test_simulated_pair import COSTS, row


def written(path: Path, *prompts: int, right: str = "1101111011") -> Path:
    path.write_text("".join(json.dumps(row(right, prompt=[1, prompt])) + "\n" for prompt in prompts))
    return path


def test_prompts_that_one_precision_lacks_count_for_none(tmp_path: Path) -> None:
    files = {"bf16": written(tmp_path / "a", 1, 2, 3), "nf4": written(tmp_path / "b", 3, 4, 2)}
    assert {name: len(texts) for name, texts in read_common(files).items()} == {"bf16": 2, "nf4": 2}
    files["int8"] = written(tmp_path / "c", 7, 8)
    with pytest.raises(ValueError, match="no prompt in common"):
        read_common(files)


def test_signals_that_foretell_acceptance_correlate_with_it(tmp_path: Path) -> None:
    texts = read_common({"bf16": written(tmp_path / "a", 1, 2, right="1101111011" * 4)})["bf16"]
    by_gamma = runs_of(texts, COSTS)
    found = with_interval(by_gamma)
    assert found["entropy"][0] < -0.5
    assert found["confidence"][0] > 0.5
    told = told_of(by_gamma, None)
    assert told["texts"] == 2
    assert 1 < told["tokens_per_step_of_4"] <= 5
