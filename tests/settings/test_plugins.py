"""Modules of the user's own, imported where nobody can import them by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spec_stack.cli.main import main
from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import SCORERS
from spec_stack.settings.plugins import ENVIRONMENT, import_plugins
from spec_stack.sglang import plugin

RULE = """
from spec_stack.prefill.registry import SCORERS
from spec_stack.prefill.rules.bm25 import ByBM25
SCORERS["of_a_plugin"] = ByBM25
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which Python finds what a test writes there."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_what_a_plugin_registers_is_known_from_then_on(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "mine_with_a_rule.py").write_text(RULE)
    monkeypatch.setenv(ENVIRONMENT, "mine_with_a_rule , ")
    with pytest.raises(ValueError, match="unknown scorer 'of_a_plugin'"):
        PrefillConfig(scorer="of_a_plugin")
    import_plugins()
    try:
        assert PrefillConfig(scorer="of_a_plugin").scorer == "of_a_plugin"
    finally:
        del SCORERS["of_a_plugin"]


def test_without_plugins_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    before = set(sys.modules)
    import_plugins()
    assert set(sys.modules) == before


@pytest.mark.parametrize(("code", "named"), [(None, "No module named"), ("1 / 0", "ZeroDivisionError")])
def test_a_plugin_that_cannot_be_imported_ends_a_command_and_a_launch_that_asks_for_the_algorithm(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str | None, named: str
) -> None:
    if code is not None:
        (modules / "mine_broken.py").write_text(code)
    monkeypatch.setenv(ENVIRONMENT, "mine_broken")
    assert main(["generate", "a prompt"]) == 2
    said = capsys.readouterr().err
    assert f"{ENVIRONMENT} names 'mine_broken'" in said
    assert named in said
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.23")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm", "SPEC_STACK"])
    with pytest.raises(SystemExit, match=named):
        plugin.register()
    # Another server of this machine goes on without.
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    with pytest.raises(ImportError, match=named):
        plugin.register()
