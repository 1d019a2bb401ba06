"""Records in files: nothing is lost, and a file that is wrong says where."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import threading
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


def test_records_are_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    add_records(some_records(), path)
    assert read_records(path) == some_records()


def test_a_line_is_the_record_as_a_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    add_records(some_records(), path)
    assert lines_of(path) == [dataclasses.asdict(record) for record in some_records()]


def test_a_label_that_is_no_valid_unicode_survives_a_line(tmp_path: Path) -> None:
    record = dataclasses.replace(step(2, 1), task="half a pair \ud800")
    add_records([record], tmp_path / "records.jsonl")
    assert read_records(tmp_path / "records.jsonl") == [record]


def test_records_written_and_records_added_are_the_same_file(tmp_path: Path) -> None:
    add_records(runs(2), tmp_path / "written.jsonl")
    for number in range(2):
        mine = [record for record in runs(2) if record.request_id == f"prompt-{number}"]
        add_records(mine, tmp_path / "added.jsonl")
    assert (tmp_path / "added.jsonl").read_bytes() == (tmp_path / "written.jsonl").read_bytes()


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, gamma in zip(paths, (2, 4), strict=True):
        add_records(runs(2, (gamma,)), path)
    assert len(read_records(*paths)) == len(runs(2, (2,))) + len(runs(2, (4,)))


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


def test_threads_that_append_to_one_file_do_not_tear_each_others_runs(tmp_path: Path) -> None:
    path, text = tmp_path / "steps.jsonl", Greedy(0, num_tokens=200)

    def work(name: int) -> None:
        for number in range(20):
            add_records(text.record(f"{name}-{number}", 4), path)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_records(path)) == 80 * len(text.record("any", 4))


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
    for wrong, message in (("steps.csv", "give a .jsonl file"), ("steps.parquet", "to_parquet converts one")):
        for refuse in (check_record_path, lambda path: add_records(some_records(), path)):
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
    ("text", "message"),
    [
        ("", "no records in the file"),
        ("a,b\n1,2\n", "line 1: not JSON"),
        ("[1, 2]\n", "line 1: no record of a step"),
        ('{"a": 1}\n', "line 1: no record of a step"),
        ("\n", "line 1: not JSON"),
    ],
)
def test_empty_and_foreign_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.jsonl(: |, ){message}"):
        read_records(path)


@pytest.mark.parametrize("name", ["records.txt", "records.csv", "records"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    for refuse in (read_records, lambda path: add_records(some_records(), path)):
        with pytest.raises(ValueError, match=r"give a \.jsonl file"):
            refuse(tmp_path / name)


def test_a_damaged_byte_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    add_records(some_records(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\xff\xfe\x00\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not JSON"):
        read_records(path)


def test_extreme_numbers_survive_the_file(tmp_path: Path) -> None:
    signals = DraftSignals([0.0, 1e-300], [1.0, 0.1 + 0.2])
    record = dataclasses.replace(step(2, 1), signals=signals, draft_s=1e-9)
    add_records([record], tmp_path / "records.jsonl")
    assert read_records(tmp_path / "records.jsonl") == [record]


def test_recomputed_tokens_are_kept_and_files_from_before_them_are_read(tmp_path: Path) -> None:
    records = [dataclasses.replace(record, num_recomputed=3) for record in Greedy(0).record("a", 4)]
    path = tmp_path / "records.jsonl"
    add_records(records, path)
    assert read_records(path) == records
    rows = lines_of(path)
    for row in rows:
        del row["num_recomputed"]
    write_lines(path, rows)
    assert {record.num_recomputed for record in read_records(path)} == {0}
