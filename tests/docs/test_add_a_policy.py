"""The page "Add a policy", followed into a copy of the package; `test_code_blocks` runs it live and in replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_stack import DraftSignals, StepContext
from tests.support.pages import ROOT, blocks, copy_repository, run_python

PAGE = ROOT / "docs" / "add-a-policy.md"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_policy_put_into_the_package_has_a_name_and_passes_the_tests_of_all(tmp_path: Path) -> None:
    copy_repository(tmp_path, "spec_stack", "tests", "experiments")
    policy = next(block for block in blocks(PAGE) if block.language == "python")
    (entry,) = [block for block in blocks(PAGE) if block.title]
    assert entry.title == "spec_stack/controller/registry.py: in POLICIES"
    (tmp_path / "spec_stack" / "controller" / "patience.py").write_text(policy.code, encoding="utf-8")
    registry = tmp_path / "spec_stack" / "controller" / "registry.py"
    before, opening, after = registry.read_text(encoding="utf-8").partition("    KNOWN_POLICIES,\n    {\n")
    assert opening
    registry.write_text(f"{before}{opening}{entry.code}{after}", encoding="utf-8")
    made = "from spec_stack.controller.registry import make_policy; print(make_policy('patience', threshold=0.3))"
    assert run_python(tmp_path, "-c", made) == "Patience(threshold=0.3, weight=0.3)\n"
    assert "patience" in run_python(tmp_path, "-m", "spec_stack", "generate", "--help-all")
    chosen = (
        "tests/controller/test_policies.py",
        "tests/test_import_rules.py",
        "-k",
        "patience or (import_rules and controller)",
    )
    assert " passed" in run_python(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "-v", *chosen)


def test_the_page_names_every_field_of_what_a_policy_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for shown in (StepContext, DraftSignals):
        for name in shown.__dataclass_fields__:
            assert f"`{name}`" in text, name
