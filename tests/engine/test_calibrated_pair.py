"""A calibration beside the draft, or named, sets the defaults; what a user sets himself stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact
from spec_stack.cli.doctor import diagnose
from spec_stack.cli.main import main
from spec_stack.hf.loading import ASSETS, load_config
from spec_stack.prefill.calibration import FILE_NAME, Calibration, fingerprint
from spec_stack.prefill.cost import Shape, counted_break_even, expected_gain
from tests.support.folders import copy_draft

SETTINGS = {
    "keep_rate": ((2048, 0.1), (8192, 0.05)),
    "draft_window": (2048, 64),
    "scorer": "bm25",
    "min_prompt_tokens": 700,
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    copy_draft(tmp_path / "draft")
    shape = fingerprint(load_config(str(ASSETS / "target"))), fingerprint(load_config(str(ASSETS / "draft")))
    Calibration(SETTINGS, *shape, margin=0.1).save(tmp_path / "draft")
    return ASSETS / "target", tmp_path / "draft"


def test_it_is_found_beside_the_draft_and_completes_the_configuration(folders: tuple[Path, Path]) -> None:
    found = SpecStackGenerator.from_pretrained(*folders, device="cpu").config.prefill
    assert found == PrefillConfig(**SETTINGS)  # type: ignore[arg-type]
    own = SpecStackConfig(PrefillConfig(keep_rate=0.5, chunk_size=16))
    mixed = SpecStackGenerator.from_pretrained(*folders, device="cpu", config=own).config.prefill
    assert (mixed.keep_rate, mixed.chunk_size, mixed.draft_window) == (0.5, 16, (2048, 64))
    named = SpecStackGenerator.from_pretrained(device="cpu", calibration=folders[1] / FILE_NAME)
    assert named.config.prefill.scorer == "bm25"
    assert "draft_window=(2048, 64)" in diagnose(*map(str, folders), "auto", "cpu")["calibration"]


def test_the_doctor_counts_what_a_calibration_or_the_default_gains(folders: tuple[Path, Path]) -> None:
    shapes = [Shape.of(load_config(str(folder))) for folder in folders]
    calibrated = Calibration.load(folders[1]).apply()
    counted = diagnose(*map(str, folders), "auto", "cpu")["gain of sparse prefill"]
    assert f"{expected_gain(*shapes, 8192, calibrated):.1f}x at 8192" in counted
    (folders[1] / FILE_NAME).unlink()
    counted = diagnose(*map(str, folders), "auto", "cpu")["gain of sparse prefill"]
    assert f"{expected_gain(*shapes, 8192, PrefillConfig()):.1f}x at 8192" in counted
    assert f"from about {counted_break_even(*shapes, PrefillConfig())} prompt tokens" in counted
    assert "32768" not in counted


def test_the_embedded_pair_s_own_is_taken_by_default_and_keeps_a_hidden_fact_of_8_192_tokens() -> None:
    shipped = Calibration.load(ASSETS / "draft")
    generator = SpecStackGenerator.from_pretrained(device="cpu")
    assert generator.config.prefill == shipped.apply()
    assert shipped.apply() != PrefillConfig()
    fact = hide_fact(generator.tokenizer, 8192, seed=0)
    result = generator.generate(messages=fact.messages, max_tokens=32)
    assert result.metrics.keep_rate < 0.2
    assert fact.is_answered_by(result.text)


def test_one_of_another_pair_is_refused_by_name_and_left_aside_with_a_warning_otherwise(
    folders: tuple[Path, Path],
) -> None:
    file = folders[1] / FILE_NAME
    content = json.loads(file.read_text())
    content["target"]["hidden_size"] = 7
    file.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="left aside: it was made for another target"):
        assert SpecStackGenerator.from_pretrained(*folders, device="cpu").config.prefill == PrefillConfig()
    with pytest.raises(ValueError, match="calibrate this pair"):
        SpecStackGenerator.from_pretrained(device="cpu", calibration=file)
    assert diagnose(*map(str, folders), "auto", "cpu")["calibration"].startswith("left aside")


@pytest.mark.slow
def test_the_command_makes_one_that_the_library_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("".join(f"Line {n} of a long text about nothing.\n" for n in range(4000)))
    out = tmp_path / "made.json"
    command = ["calibrate", "--lengths", "512", "1024", "--prompts", "12", "--device", "cpu", "--out", str(out)]
    command += ["--documents", str(tmp_path / "texts")]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "prompts of 512 tokens" in told.out
    assert "12/15" in told.err
    assert main(["generate", "hello", "--max-tokens", "3", "--device", "cpu", "--calibration", str(out)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out"),
        (["--out", "x.json", "--prompts", "0"], "prompts must be a whole number, 1 or more"),
        (["--out", "x.json", "--budget", "0"], "budget_s must be over 0"),
        (["--out", "x.json", "--documents", "nowhere"], "no folder"),
    ],
)
def test_a_calibration_that_cannot_be_made_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
