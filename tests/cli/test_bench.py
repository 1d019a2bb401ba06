"""`spec-stack bench`: live on the embedded pair, by replay, and with a plugin's policy."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_stack.cli import main as command_line
from spec_stack.cli.main import main
from spec_stack.controller.registry import POLICIES
from spec_stack.records import add_records
from tests.support.controller_data import runs

PLUGIN = """
from spec_stack import Policy
from spec_stack.controller.registry import POLICIES


class Mine(Policy):
    def choose(self, context):
        return 3


POLICIES["bench_plugin"] = Mine
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "bench_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_plugin", raising=False)
    monkeypatch.setenv("SPEC_STACK_PLUGINS", "bench_plugin")
    yield
    del POLICIES["bench_plugin"]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_plugins_policy_is_replayed_and_written_as_csv(
    tmp_path: Path, plugin: None, capsys: pytest.CaptureFixture[str]
) -> None:
    records, table = tmp_path / "records.jsonl", tmp_path / "board.csv"
    add_records(runs(4), records)
    assert main(["bench", str(records), "--folds", "2", "--csv", str(table)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("replay of 4 recorded texts")
    assert "\nbench_plugin " in told
    with table.open(newline="") as file:
        assert {"bench_plugin", "oracle"} <= {row["policy"] for row in csv.DictReader(file)}


def test_a_plugins_policy_runs_live_as_json(tmp_path: Path, plugin: None, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def add(a, b):", "task": "code"}\n')
    options = ["--policies", "bench_plugin", "fixed:gamma=2", "--no-rivals", "--max-tokens", "3", "--device", "cpu"]
    assert main(["bench", "--prompts", str(prompts), *options, "--json"]) == 0
    captured = capsys.readouterr()
    names = {line["policy"] for line in json.loads(captured.out)["lines"]}
    assert names == {"plain", "default", "n-gram lookup", "bench_plugin", "fixed:gamma=2"}
    assert "[  1/1] code: plain" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["records.jsonl", "--prompts", "x.jsonl"], "records are replayed without models and prompts"),
        (["--policies", "mine"], "unknown policy 'mine'"),
        (["--csv", "/nowhere/x.csv"], "cannot write /nowhere/x.csv"),
        (["--rows", "/nowhere/x.jsonl"], "cannot write /nowhere/x.jsonl"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "loading" not in captured.err


def test_a_plot_without_matplotlib_is_rejected_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "board.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
