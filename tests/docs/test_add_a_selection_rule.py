"""The page "Add a selection rule", followed into a copy of the package; `test_code_blocks` runs it live."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from spec_stack.prefill.rule import ScoringInputs
from tests.support.pages import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "add-a-selection-rule.md"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rule_put_into_the_package_has_a_name_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "spec_stack", tmp_path / "spec_stack", ignore=shutil.ignore_patterns("__pycache__"))
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (entry,) = [block for block in blocks(PAGE) if block.title == "spec_stack/prefill/registry.py: in SCORERS"]
    (tmp_path / "spec_stack" / "prefill" / "rules" / "rare_words.py").write_text(rule.code, encoding="utf-8")
    registry = tmp_path / "spec_stack" / "prefill" / "registry.py"
    before, opening, after = registry.read_text(encoding="utf-8").partition("    KNOWN_SCORERS,\n    {\n")
    assert opening
    registry.write_text(f"{before}{opening}{entry.code}\n{after}", encoding="utf-8")
    made = "from spec_stack.prefill.registry import make_rule; print(type(make_rule('rare_words')).__name__)"
    assert run_python(tmp_path, "-c", made) == "RareWords\n"
    text = "".join(f"def step_{number}(value):\n    return value + {number}\n" for number in range(40))
    asked = ("--scorer", "rare_words", "--keep-rate", "0.3", "--sparse-prefill", "on", "--max-tokens", "4", "--json")
    answer = run_python(tmp_path, "-m", "spec_stack", "generate", *asked, text + "# What does step_17 add?\n")
    assert '"sparse_prefill": true' in answer


# By day tests/serve/test_plugins.py starts a server with a module of the user.
@pytest.mark.slow
@pytest.mark.nightly
def test_a_rule_in_a_module_of_ones_own_has_a_name_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = next(block for block in blocks(PAGE) if block.language == "python")
    (registers,) = [block for block in blocks(PAGE) if block.title == "rare_words.py: at the end"]
    (tmp_path / "rare_words.py").write_text(rule.code + registers.code, encoding="utf-8")
    monkeypatch.setenv("SPEC_STACK_PLUGINS", "rare_words")
    text = "".join(f"def step_{number}(value):\n    return value + {number}\n" for number in range(40))
    asked = ("--scorer", "rare_words", "--keep-rate", "0.3", "--sparse-prefill", "on", "--max-tokens", "4", "--json")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    answer = run_python(path, "-m", "spec_stack", "generate", *asked, text + "# What does step_17 add?\n", cwd=tmp_path)
    assert '"sparse_prefill": true' in answer


def test_the_page_names_everything_that_a_rule_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ScoringInputs.__dataclass_fields__:
        # Importance is for whoever has computed it already; rules ask for it by its method.
        assert f"`inputs.{name}`" in text or name == "importance", name
