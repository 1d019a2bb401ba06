"""The page "Policies", followed from an empty folder; its figures; its notebook."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments.common.headlines import load
from spec_stack import SpecStackGenerator
from spec_stack.cli.main import main
from spec_stack.controller.registry import POLICIES
from tests.support.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "policies.md"
NOTEBOOK = ROOT / "examples" / "policies.ipynb"
PRECISIONS = ("fp32", "bf16", "int8", "nf4")
COSTS = ("0.1", "0.25", "0.5")
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def registered() -> Iterator[None]:
    """The registry, put back afterwards."""
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


def commands() -> list[str]:
    return [line for block in blocks(PAGE) if block.language == "bash" for line in block.code.splitlines()]


def of_language(language: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_pages_own_policy_is_benched_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], registered: None
) -> None:
    pytest.importorskip("matplotlib")
    module = next(block for block in of_language("python") if block.title == "mine.py")
    (tmp_path / "mine.py").write_text(module.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for assignment in next(line for line in commands() if line.startswith("export "))[len("export ") :].split():
        name, _, value = assignment.partition("=")
        monkeypatch.setenv(name, value)
        if name == "PYTHONPATH":
            monkeypatch.syspath_prepend(tmp_path / value)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    command = shlex.split(next(line for line in commands() if "--policies three" in line))
    assert main([*command[1:], "--csv", "mine.csv"]) == 0
    told = capsys.readouterr().out
    assert "\nthree " in told
    assert "embedded test pair" in told
    assert Path("mine.png").stat().st_size > 10_000
    with Path("mine.csv").open(newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file) if row["task"] == "all"}
    assert rows["three"]["num_same"] == rows["three"]["num_prompts"] == "8"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebooks_cells_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], registered: None
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), vars(module))
    for board in ("live", "board"):
        assert "after rejection" in {line.policy for line in vars(module)[board].lines}
    assert Path("policies.csv").exists()
    assert Path("policies.png").exists()


def test_records_become_a_data_frame_in_three_lines(
    embedded: SpecStackGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    found = embedded.generate(
        "def add(a, b):\n", max_tokens=9, ignore_eos=True, gamma=4, records="steps.jsonl", sparse_prefill="off"
    )
    (block,) = [block for block in of_language("python") if "pandas" in block.code]
    assert len([line for line in block.code.splitlines() if line and not line.startswith("import")]) == 3
    namespace: dict[str, Any] = {}
    exec(block.code, namespace)
    steps, tokens = namespace["steps"], namespace["tokens"]
    assert steps.num_tokens.sum() == found.metrics.num_tokens
    assert len(tokens) == steps.gamma.sum() == found.metrics.num_proposed
    assert tokens.confidence.between(0, 1).all()


def cells(speeds: list[list[float]]) -> str:
    return " | ".join(f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in speeds)


def test_the_page_has_the_committed_figures() -> None:
    text, boards = PAGE.read_text(encoding="utf-8"), load("policies")["boards"]
    recorded, cold = boards["as recorded"], boards["started anew"]
    shown = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.count(" [") == 4]
    policies = [name for name in shown if name in recorded["fp32"]["all"]]
    assert {"throughput", "confidence", "confidence, tuned", "speckv, trained", "oracle"} < set(policies)
    rows = [f"| {name} | {cells([recorded[each]['all'][name] for each in PRECISIONS])} |" for name in policies]
    rows.append(
        "{:.2f}, {:.2f}, {:.2f} and {:.2f}.".format(*(cold[each]["all"]["throughput"][0] for each in PRECISIONS))
    )
    for label, name, how in (
        ("throughput, unsure or sure", "throughput", "unsure"),
        ("confidence, unsure", "confidence", "unsure"),
        ("confidence, sure", "confidence", "sure"),
        ("speckv, sure", "speckv", "sure"),
    ):
        wrong = [boards[f"always wrong, {how}, {cost} of a plain step a token"]["fp32"]["all"][name] for cost in COSTS]
        rows.append(f"| {label} | {' | '.join(f'{speed:.2f}' for speed, _, _ in wrong)} |")
    assert [row for row in rows if row not in text] == []
    published = load("as_published")
    assert f"{published['within']} of {published['cells']} cells" in text
    # What the page concludes.
    for each in PRECISIONS:
        default, rival = recorded[each]["all"]["throughput"], recorded[each]["all"]["confidence"]
        assert default[1] < rival[0] < default[2]
