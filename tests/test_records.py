"""Records in files: nothing is lost, and a file that is wrong says where."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.records import add_records, check_record_path, read_records
from tests.support.controller_data import Greedy, runs, step

ROOT = Path(__file__).parents[1]


def some_records() -> list[StepRecord]:
    plain = dataclasses.replace(step(0, 0), request_id='plain, with a comma, "quotes" and an é', policy="fixed")
    return [*Greedy(0).record("a", 4, prefill=8), *Greedy(1).record("b", 2, precision="nf4", task=""), plain]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_line_is_the_record_as_a_dictionary_and_is_read_back_equal(tmp_path: Path) -> None:
    path, signals = tmp_path / "records.jsonl", DraftSignals([0.0, 1e-300], [1.0, 0.1 + 0.2])
    extreme = dataclasses.replace(step(2, 1), signals=signals, draft_s=1e-9, num_recomputed=3, task="half \ud800")
    records = [*some_records(), extreme]
    add_records(records, path)
    assert read_records(path) == records
    rows = lines_of(path)
    assert rows == [dataclasses.asdict(record) for record in records]
    # Files from before recomputed tokens.
    write_lines(path, [{name: value for name, value in row.items() if name != "num_recomputed"} for row in rows])
    assert read_records(path) == [*some_records(), dataclasses.replace(extreme, num_recomputed=0)]


def test_files_are_appended_to_and_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, gamma in zip(paths, (2, 4), strict=True):
        for number in range(2):
            add_records([each for each in runs(2, (gamma,)) if each.request_id == f"prompt-{number}"], path)
    assert read_records(*paths) == [*runs(2, (2,)), *runs(2, (4,))]


def test_positions_and_correctness_of_every_drafted_token_can_be_told_from_a_run(tmp_path: Path) -> None:
    greedy, path = Greedy(4), tmp_path / "records.jsonl"
    add_records(greedy.record("a", 4), path)
    position = 0
    for row in lines_of(path):
        for index in range(min(row["num_accepted"] + 1, row["gamma"])):
            assert greedy.correct[position + index] == (index < row["num_accepted"])
        position += row["num_tokens"]


ADDING = """
import sys
from pathlib import Path
from spec_stack.records import add_records
from tests.support.controller_data import Greedy
path, name = Path(sys.argv[1]), sys.argv[2]
text = Greedy(0, num_tokens=400)
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    add_records(text.record(f"{name}-{number}", 4), path)
"""


@pytest.mark.slow
def test_processes_that_append_to_one_file_do_not_tear_each_others_runs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADDING, str(path), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=600)
        assert process.returncode == 0
    expected = Greedy(0, num_tokens=400).record("any", 4)
    found: dict[str, list[StepRecord]] = {}
    for record in read_records(path):
        found.setdefault(record.request_id, []).append(dataclasses.replace(record, request_id="any"))
    assert set(found) == {f"{name}-{number}" for name in ("one", "two") for number in range(40)}
    assert all(records == expected for records in found.values())


def test_appending_leaves_what_the_file_holds_unread_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    add_records(Greedy(0).record("a", 4), path)
    path.write_bytes(b"damaged\n" + path.read_bytes())
    before = path.read_bytes()
    check_record_path(path)
    add_records(Greedy(1).record("b", 4), path)
    assert path.read_bytes().startswith(before)
    with pytest.raises(ValueError, match=r"steps\.jsonl, line 1: not JSON"):
        read_records(path)


def test_a_path_that_cannot_be_appended_to_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    check_record_path(path)
    add_records(Greedy(0).record("a", 4), path)
    check_record_path(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="last line is not finished"):
        check_record_path(path)
    path.write_text("")
    check_record_path(path)
    for wrong, message in (("steps", r"give a \.jsonl file"), ("steps.parquet", "to_parquet converts one")):
        for refuse in (check_record_path, read_records, lambda path: add_records(some_records(), path)):
            with pytest.raises(ValueError, match=message):
                refuse(tmp_path / wrong)
    with pytest.raises(ValueError, match="does not exist"):
        check_record_path(tmp_path / "no" / "steps.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match="a folder"):
        check_record_path(tmp_path / "folder.jsonl")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_accepted", 9, "contradict"),
        ("num_tokens", 9, "contradict"),
        ("gamma", "four", "no record"),
        ("signals", {"entropy": [1.0] * 4}, "contradict"),
        ("signals", [1.0] * 4, "no record"),
        ("position", 3, "no record.*'position'"),
        ("verify_s", math.nan, "verify_s cannot be nan"),
        ("draft_s", None, "draft_s cannot be None"),
        ("verify_s", "0.1", "verify_s cannot be '0.1'"),
        ("keep_rate", math.inf, "keep_rate cannot be inf"),
        ("step", 2.5, r"step cannot be 2\.5"),
        ("precision", None, "precision cannot be None"),
        ("signals", {"entropy": [None] * 4, "confidence": [0.5] * 4}, "entropy cannot be None"),
        ("signals", {"entropy": [1.0] * 4, "confidence": [math.nan] * 4}, "confidence cannot be nan"),
    ],
)
def test_a_wrong_value_is_named_with_file_and_line(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    add_records(Greedy(0).record("a", 4), path)
    rows = lines_of(path)
    rows[2][field] = value
    write_lines(path, rows)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{message}"):
        read_records(path)


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = some_records()
    records[1] = dataclasses.replace(records[1], verify_s=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        add_records(records, path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no records in the file"),
        (b"a,b\n1,2\n", "line 1: not JSON"),
        (b"[1, 2]\n", "line 1: no record of a step"),
        (b'{"a": 1}\n', "line 1: no record of a step"),
        (b"\xff\xfe\x00\n", "line 1: not JSON"),
    ],
)
def test_empty_and_foreign_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.jsonl(: |, ){message}"):
        read_records(path)
