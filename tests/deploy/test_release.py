"""A release is refused while its owner is a placeholder, or version, tag and changelog disagree."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from spec_stack import __version__
from tests.support.pages import ROOT

TAG = f"v{__version__}"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".github" / "check_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """The files that are read, as they must be for a release."""
    for name in ("pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md", "SECURITY.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("OWNER", "somebody"), encoding="utf-8")
    (tmp_path / "spec_stack").mkdir()
    shutil.copy(ROOT / "spec_stack" / "__init__.py", tmp_path / "spec_stack")
    changes = f"# Changelog\n\n## [Unreleased]\n\n## [{__version__}] - 2026-11-28\n\n- New.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes, encoding="utf-8")
    return tmp_path


def test_the_project_is_refused_while_owner_stands(release: ModuleType) -> None:
    named = {line.partition(":")[0] for line in release.problems(TAG) if "replace OWNER" in line}
    assert {"pyproject.toml", "mkdocs.yml", "CITATION.cff", "SECURITY.md"} <= named


def test_nothing_else_is_wrong_with_version_and_citation(release: ModuleType) -> None:
    assert [line for line in release.problems(TAG) if line.startswith(("spec_stack/", "CITATION.cff: there"))] == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("README.md", "# spec_stack", "# spec_stack\nhttps://github.com/OWNER/spec_stack", "README.md: replace OWNER"),
        ("mkdocs.yml", "somebody.github.io", "OWNER.github.io", "mkdocs.yml: replace OWNER"),
        ("CHANGELOG.md", "- 2026-11-28", "", "there is no part"),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- Later.\n", "Unreleased is not empty"),
        ("CITATION.cff", f"version: {__version__}", "version: 0.0.1", "CITATION.cff: there is no line version"),
        ("spec_stack/__init__.py", __version__, "9.9.9", "__init__.py: there is no line __version__"),
    ],
)
def test_a_flaw_is_named(release: ModuleType, ready: Path, name: str, old: str, new: str, problem: str) -> None:
    text = (ready / name).read_text(encoding="utf-8")
    assert old in text
    (ready / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    (found,) = release.problems(TAG, ready)
    assert problem in found


def test_publishing_runs_the_check() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8"))["jobs"]
    assert any("python .github/check_release.py" in step.get("run", "") for step in jobs["build"]["steps"])
    assert jobs["publish"]["needs"] == "build"
