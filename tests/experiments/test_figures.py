"""`make figures`: every row of the README has a command, and a run's figures stand beside the README's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import figures
from experiments.common import front_page
from experiments.common.headlines import CALIBRATION, RESULTS
from experiments.real.evidence_prompts import shaped_prompts
from experiments.real.fetch_texts import main as fetch_texts

SIZES = {"small": (figures.EMBEDDED, figures.SMALL), "whole": (figures.EMBEDDED, figures.WHOLE)}


@pytest.mark.parametrize("name", SIZES)
def test_every_row_of_the_readme_has_a_command_that_makes_its_results_by_its_script(name: str, tmp_path: Path) -> None:
    made = dict(figures.commands(*SIZES[name], tmp_path))
    assert {file for row in front_page.ROWS for file in row.files} == made.keys()
    for file, (_, *given) in made.items():
        assert given[given.index("--out") + 1] == str(tmp_path / f"{file}.json")
        assert given[given.index("--rows") + 1] == str(tmp_path / f"{file}.jsonl")
    for row in front_page.ROWS:
        script = (figures.ROOT / "experiments" / "runs" / f"{row.run}.sh").read_text(encoding="utf-8")
        assert all(f"experiments.{made[file][0]}" in script for file in row.files)


def test_the_figures_of_a_run_stand_under_the_readmes_with_their_commands(tmp_path: Path) -> None:
    content = json.loads((RESULTS / "evidence_shapes_qwen_2k.json").read_text(encoding="utf-8"))
    content["whole"]["calibrated"]["0.1"], content["num_prompts"] = [0.5, 0.25, 0.75], 9
    (tmp_path / "evidence_shapes_qwen_2k.json").write_text(json.dumps(content), encoding="utf-8")
    made = {name: ["python", *command] for name, command in figures.commands(figures.EMBEDDED, figures.SMALL, tmp_path)}
    told = figures.comparison(tmp_path, CALIBRATION, made)
    part = told[told.index("prompts with all evidence kept") :]
    assert re.search(
        r"  README .*\n  here   0\.50 \[0\.25, 0\.75\] \| – \| –  \(n 9/–/–\)\n    python real\.evidence", part
    )


def test_a_pair_that_is_half_named_or_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["figures", "--out", str(tmp_path), "--target", "x"])
    with pytest.raises(ValueError, match="name both"):
        figures.main()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="is no folder, and cannot be fetched"):
        figures.folder_of("not/a/name")


def test_texts_are_made_offline_and_hold_what_evidence_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["fetch_texts", str(tmp_path), "--offline"])
    fetch_texts()
    assert "PSF-2.0" in (tmp_path / "LICENCES.md").read_text(encoding="utf-8")
    prompts = list(shaped_prompts(tmp_path, 900, 6, lambda text: len(text) // 4 + 1, 1, 1))
    for prompt in prompts:
        assert all(prompt.document[start:stop] for start, stop in prompt.spans)
    assert len({prompt.source for prompt in prompts}) == 6


def test_a_run_in_slices_shows_what_it_has(tmp_path: Path) -> None:
    nothing = {
        "real_speed": {"lengths": {"2048": {"dense_ttft_s": 1.0}}},
        "real_end_to_end": {"cells": {}},
        "evidence": {"num_prompts": 0, "whole": {}},
        "answers": {"shapes": {"all": {"over_dense": {"calibrated 0.1": {}}}}},
        "real_decode": {"num_prompts": 0},
    }
    made = {name: [name] for name in dict(figures.commands(*SIZES["small"], tmp_path))}
    for name in made:
        content = next(content for begin, content in nothing.items() if name.startswith(begin))
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    lines = figures.comparison(tmp_path, CALIBRATION, made).splitlines()
    assert [line for line in lines if line.startswith("  here") and any(char.isdigit() for char in line)] == []
    assert sum(line.startswith("  README") for line in lines) == len(front_page.ROWS)
