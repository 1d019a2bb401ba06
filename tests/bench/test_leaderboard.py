"""A leaderboard as a table, CSV and a plot."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from spec_stack.bench.intervals import Interval
from spec_stack.bench.leaderboard import Leaderboard, Line, with_all


def line(policy: str, speed: float, task: str = "all", precision: str = "fp32", num_same: int | None = 3) -> Line:
    acceptance = None if policy == "plain" else 0.5
    return Line(
        precision, task, policy, 4, Interval(speed, speed - 0.1, speed + 0.2), 10.0, 2.0, 1.5, acceptance, num_same
    )


BOARD = Leaderboard(
    "live: a pair",
    "plain",
    [line("plain", 1.0), line("mine", 2.0), line("plain", 1.0, "code"), line("mine", 3.0, "code")],
    ["a note"],
)


def test_the_table_ranks_by_speed_and_shows_single_tasks_and_notes() -> None:
    told = BOARD.table().split("\n")
    assert told[0] == "live: a pair"
    assert told[2] == "fp32, 4 prompts; speed over plain with 95 % intervals"
    assert told[3].split()[-1] == "code"
    assert told[5].split() == ["mine", "2.00", "[1.90,", "2.20]", "10.0", "2.00", "1.50", "50%", "3/4", "3.00"]
    assert told[6].split() == ["plain", "1.00", "[0.90,", "1.20]", "10.0", "2.00", "1.50", "–", "3/4", "1.00"]
    assert told[-1] == "a note"


def test_the_csv_has_a_row_per_line_and_json_the_same(tmp_path: Path) -> None:
    BOARD.write_csv(tmp_path / "board.csv")
    with (tmp_path / "board.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["policy"], float(row["speed"]), float(row["speed_high"])) for row in rows] == [
        ("all", "plain", 1.0, 1.2),
        ("all", "mine", 2.0, 2.2),
        ("code", "plain", 1.0, 1.2),
        ("code", "mine", 3.0, 3.2),
    ]
    assert json.loads(json.dumps(BOARD.as_dict()))["lines"][1]["speed"] == {"value": 2.0, "low": 1.9, "high": 2.2}


@pytest.mark.slow
def test_the_plot_is_a_picture_with_a_panel_per_precision(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    BOARD.plot(one)
    Leaderboard("", "plain", [*BOARD.lines, line("mine", 1.5, precision="nf4")]).plot(two)
    from PIL import Image

    with Image.open(one) as narrow, Image.open(two) as wide:
        assert wide.width == pytest.approx(2 * narrow.width, abs=2)


def test_a_single_task_is_not_repeated_and_no_task_has_no_name() -> None:
    assert with_all(["code", "chat", "code"]) == ["all", "code", "chat"]
    assert with_all(["code", "code"]) == with_all([""]) == with_all([]) == ["all"]
    assert with_all(["code", "", "all"]) == ["all", "code"]
