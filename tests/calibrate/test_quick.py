"""A calibration while a pair loads: made once, saved, found by every other load."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spec_stack import PrefillConfig, Pruner, SpecStackGenerator
from spec_stack.calibrate import search
from spec_stack.calibrate.search import QUICK
from spec_stack.cli.main import main
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import FILE_NAME, Calibration
from spec_stack.prefill.shipped import file_of


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A folder of a draft that no calibration is known of."""
    folder = tmp_path / "draft"
    shutil.copytree(ASSETS / "draft", folder)
    (folder / FILE_NAME).unlink()
    return folder


def test_a_pair_without_a_calibration_is_calibrated_at_its_first_load_alone(
    draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spec_stack"):
        first = SpecStackGenerator.from_pretrained(ASSETS / "target", draft, calibration="auto")
    assert str(draft / FILE_NAME) in caplog.text
    assert first.config.prefill.calibrated_by == FILE_NAME
    caplog.clear()
    again = SpecStackGenerator.from_pretrained(ASSETS / "target", draft, calibration="auto")
    unnamed = Pruner.from_pretrained(draft, ASSETS / "target")
    assert not caplog.text
    assert again.config.prefill == first.config.prefill
    assert unnamed.config.scoring_heads == first.config.prefill.scoring_heads


def test_a_pruner_calibrates_its_draft_for_any_target(draft: Path) -> None:
    pruner = Pruner.from_pretrained(draft, ASSETS / "target", calibration="auto")
    generator = SpecStackGenerator.from_pretrained(ASSETS / "target", draft)
    assert generator.config.prefill.scoring_heads == pruner.config.scoring_heads
    assert generator.config.prefill.calibrated_by == FILE_NAME


def test_few_prompts_choose_no_keep_rate(draft: Path) -> None:
    assert main(["calibrate", "--quick", "--target", str(ASSETS / "target"), "--draft", str(draft)]) == 0
    assert not {"keep_rate", "min_prompt_tokens"} & set(Calibration.load(draft).settings)


@pytest.mark.parametrize("more", [["--lengths", "512"], ["--quick"]])
def test_a_calibration_that_ran_out_of_time_leaves_the_earlier_one(
    draft: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = Path(shutil.copy(ASSETS / "draft" / FILE_NAME, draft)).read_bytes()
    command = ["calibrate", "--target", str(ASSETS / "target"), "--draft", str(draft), "--budget", "0.000001", *more]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "0 prompts are too few to choose by, so nothing is saved" in captured.err.splitlines()[-1]
    assert not captured.out
    assert (draft / FILE_NAME).read_bytes() == earlier


def test_a_load_without_the_time_to_calibrate_saves_nothing(
    draft: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        search, "calibrate_heads", partial(search.calibrate_heads, config=replace(QUICK, budget_s=1e-9))
    )
    generator = SpecStackGenerator.from_pretrained(ASSETS / "target", draft, calibration="auto")
    assert "the next load tries again" in caplog.text
    assert generator.config.prefill == PrefillConfig()
    assert not (draft / FILE_NAME).exists()


def test_a_number_of_prompts_beside_quick_is_an_error(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["calibrate", "--quick", "--prompts", "9", "--draft", str(draft)]
    assert main(command) != 0
    assert "--quick" in capsys.readouterr().err


def test_the_calibration_of_a_hub_id_lies_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert file_of("owner/name") == tmp_path / "spec_stack" / "owner--name.json"


def test_an_unwritable_place_is_told_and_the_heads_are_used(draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    (draft / FILE_NAME).symlink_to(draft / "missing" / "file")
    SpecStackGenerator.from_pretrained(ASSETS / "target", draft, calibration="auto")
    assert "could not be saved" in caplog.text


def test_a_saved_calibration_of_other_weights_is_left_aside(draft: Path) -> None:
    saved = Calibration.load(ASSETS / "draft")
    replace(saved, weights=[-value for value in saved.weights]).save(draft)
    with pytest.warns(UserWarning, match="other weights"):
        SpecStackGenerator.from_pretrained(ASSETS / "target", draft)
