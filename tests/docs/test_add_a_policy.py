"""The page "Add a policy", followed to the letter: every block runs, and prints what the page says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-a-policy.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", flags=re.M | re.S)


def blocks() -> list[tuple[str, str]]:
    """(language, code) of the blocks that are run or printed, in order; blocks with a title belong into a file."""
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_makes_a_policy_that_runs_live_and_in_replay(tmp_path: Path) -> None:
    found = blocks()
    code = "".join(code for language, code in found if language == "python")
    printed = "".join(code for language, code in found if language == "text")
    assert "replay(" in code
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {f"gamma-{gamma}.jsonl" for gamma in (0, 2, 4, 8)}


def test_the_page_names_every_field_of_what_a_policy_is_shown() -> None:
    from spec_stack import DraftSignals, StepContext

    text = PAGE.read_text(encoding="utf-8")
    for shown in (StepContext, DraftSignals):
        for name in shown.__dataclass_fields__:
            assert f"`{name}`" in text, name


def test_the_line_that_the_page_adds_to_the_registry_has_the_registrys_form() -> None:
    registry = (ROOT / "spec_stack" / "controller" / "registry.py").read_text(encoding="utf-8")
    line = '"{name}": "spec_stack.controller.{name}:{kind}",'
    assert line.format(name="ema", kind="Ema") in registry
    assert line.format(name="patience", kind="Patience") in PAGE.read_text(encoding="utf-8")
