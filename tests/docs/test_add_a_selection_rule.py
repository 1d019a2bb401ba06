"""The page "Add a selection rule", followed into a copy of the package; `test_code_blocks` runs it live."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from spec_stack.prefill.rule import ScoringInputs
from tests.support.pages import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "add-a-selection-rule.md"


def titled(title: str) -> str:
    (code,) = [block.code for block in blocks(PAGE) if block.title == title]
    return code


def check_that_it_selects(root: Path | str, folder: Path) -> None:
    """A prompt is pruned by the rule's name, by the package at `root`."""
    text = "".join(f"def step_{number}(value):\n    return value + {number}\n" for number in range(40))
    flags = ("--scorer", "rare_words", "--keep-rate", "0.3", "--sparse-prefill", "on", "--max-tokens", "4", "--json")
    answer = run_python(root, "-m", "spec_stack", "generate", *flags, text + "# What does step_17 add?\n", cwd=folder)
    assert '"sparse_prefill": true' in answer


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rule_put_into_the_package_has_a_name_on_the_command_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "spec_stack", tmp_path / "spec_stack", ignore=shutil.ignore_patterns("__pycache__"))
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "spec_stack" / "prefill" / "rules" / "rare_words.py").write_text(rule.code, encoding="utf-8")
    registry = tmp_path / "spec_stack" / "prefill" / "registry.py"
    before, opening, after = registry.read_text(encoding="utf-8").partition("    KNOWN_SCORERS,\n    {\n")
    entry = titled("spec_stack/prefill/registry.py: in SCORERS")
    assert opening
    registry.write_text(f"{before}{opening}{entry}\n{after}", encoding="utf-8")
    check_that_it_selects(tmp_path, tmp_path)


# By day tests/serving/test_plugins.py starts a server with a module of the user.
@pytest.mark.slow
@pytest.mark.nightly
def test_a_rule_in_a_module_of_ones_own_has_a_name_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "rare_words.py").write_text(rule.code + titled("rare_words.py: at the end"), encoding="utf-8")
    monkeypatch.setenv("SPEC_STACK_PLUGINS", "rare_words")
    check_that_it_selects(f"{ROOT}{os.pathsep}{tmp_path}", tmp_path)


def test_the_page_names_everything_that_a_rule_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ScoringInputs.__dataclass_fields__:
        # Importance is for whoever has computed it already; rules ask for it by its method.
        assert f"`inputs.{name}`" in text or name == "importance", name
