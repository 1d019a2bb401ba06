"""Records in files: nothing is lost, and a file that is wrong says where."""

from __future__ import annotations

import builtins
import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.offline.records import COLUMNS, PUBLISHED_COLUMNS, read_records, read_steps, write_records
from tests.support.controller_data import Greedy, runs, step

SUFFIXES = [".csv", ".parquet"]


def some_records() -> list[StepRecord]:
    plain = dataclasses.replace(step(0, 0), request_id="plain, with a comma", policy="fixed")
    return [*Greedy(0).record("a", 4, prefill=8), *Greedy(1).record("b", 2, precision="nf4", task=""), plain]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_records_are_read_back_equal(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"records{suffix}"
    write_records(some_records(), path)
    assert read_records(path) == some_records()


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for path, gamma in zip(paths, (2, 4), strict=True):
        write_records(runs(2, (gamma,)), path)
    assert len(read_records(*paths)) == len(runs(2, (2,))) + len(runs(2, (4,)))
    with pytest.raises(ValueError, match=r"one\.csv, line 2, column 'request_id'.*a second time"):
        read_records(paths[0], paths[0])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def test_positions_and_correctness_of_every_drafted_token_can_be_told_from_a_row(tmp_path: Path) -> None:
    greedy, path = Greedy(4), tmp_path / "records.csv"
    write_records(greedy.record("a", 4), path)
    for row in rows_of(path):
        position, accepted = int(row["position"]), int(row["accepted"])
        for index in range(min(accepted + 1, int(row["gamma"]))):
            assert greedy.correct[position + index] == (index < accepted)


def test_a_published_file_and_ours_load_alike(tmp_path: Path) -> None:
    ours, published = tmp_path / "ours.csv", tmp_path / "published.csv"
    records = runs(2)
    write_records(records, ours)
    write_rows(published, [row for row in rows_of(ours) if row["gamma"] != "0"], PUBLISHED_COLUMNS)
    one, other = read_steps(ours), read_steps(published)
    for name in vars(one):
        assert vars(one)[name].tolist() == vars(other)[name].tolist()
    assert len(one) == sum(record.gamma > 0 for record in records)
    with pytest.raises(ValueError, match=r"published\.csv: missing columns request_id, policy"):
        read_records(published)


def test_step_tables_leave_out_prefill_and_plain_steps(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    write_records(some_records(), path)
    wanted = [record for record in some_records() if record.gamma and not record.is_prefill]
    assert read_steps(path).num_accepted.tolist() == [record.num_accepted for record in wanted]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("compression", "int4", "unknown precision 'int4'; known: fp32"),
        ("gamma", "17", "unknown gamma 17"),
        ("gamma", "2.5", "2.5 is not a count"),
        ("gamma", "-1", "not a count"),
        ("accepted", "nan", "not finite"),
        ("accepted", "9", "9 accepted of 4 proposed"),
        ("draft_s", "", "empty"),
        ("verify_s", "fast", "'fast' is not a number"),
        ("keep_rate", "inf", "not finite"),
        ("is_prefill", "yes", "neither True nor False"),
        ("request_id", "", "empty"),
        ("draft_confidence", "0.5 nan 0.5 0.5", "not finite"),
        ("draft_entropy", "1.0", "1 values for 4 drafted tokens"),
        ("tokens_produced", "9", "9 tokens from"),
    ],
)
def test_a_wrong_cell_is_named_with_file_line_and_column(tmp_path: Path, column: str, value: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    write_records(Greedy(0).record("a", 4), path)
    rows = rows_of(path)
    rows[2][column] = value
    write_rows(path, rows)
    with pytest.raises(ValueError, match=rf"bad\.csv, line 4, column '{column}': .*{message}"):
        read_records(path)


@pytest.mark.parametrize("column", ["mean_draft_entropy", "acceptance_rate", "min_draft_confidence"])
def test_step_tables_refuse_nan_by_place(tmp_path: Path, column: str) -> None:
    path = tmp_path / "bad.csv"
    write_records(Greedy(0).record("a", 4), path)
    rows = rows_of(path)
    rows[0][column] = "nan"
    write_rows(path, rows)
    with pytest.raises(ValueError, match=rf"bad\.csv, line 2, column '{column}'"):
        read_steps(path)


@pytest.mark.parametrize("read", [read_records, read_steps])
def test_empty_and_joined_and_foreign_files_are_refused(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("")
    with pytest.raises(ValueError, match=r"bad\.csv: the file is empty"):
        read(path)
    write_rows(path, [])
    with pytest.raises(ValueError, match=r"bad\.csv: no rows"):
        read(path)
    write_records(Greedy(0).record("a", 4), path)
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match=r"line \d+: a second header"):
        read(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="missing columns compression, gamma"):
        read(path)
    with pytest.raises(ValueError, match="give a \\.csv or a \\.parquet file"):
        read(tmp_path / "records.txt")


def test_a_row_with_cells_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    write_records(Greedy(0).record("a", 4), path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3].rsplit(",", 3)[0]]) + "\n")
    with pytest.raises(ValueError, match=f"line 4: {len(COLUMNS) - 3} cells under {len(COLUMNS)} columns"):
        read_records(path)


def test_mixed_up_runs_are_refused_when_written_and_when_read(tmp_path: Path) -> None:
    path = tmp_path / "mixed.csv"
    one, other = Greedy(0).record("a", 4), Greedy(1).record("b", 4)
    with pytest.raises(ValueError, match=r"record 2, column 'request_id'.*a second time"):
        write_records([one[0], other[0], one[1]], path)
    with pytest.raises(ValueError, match=r"column 'step': 2 after 0"):
        write_records([one[0], one[2]], path)
    with pytest.raises(ValueError, match=r"column 'task': 'x' after 'chat'"):
        write_records([one[0], dataclasses.replace(one[1], task="x")], path)
    with pytest.raises(ValueError, match="no records"):
        write_records([], path)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet: not a Parquet file"):
        read_records(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        write_records(some_records(), tmp_path / "records.parquet")


def test_extreme_signals_survive_the_file(tmp_path: Path) -> None:
    signals = DraftSignals([0.0, 1e-300], [1.0, 0.1 + 0.2])
    record = dataclasses.replace(step(2, 1), signals=signals, draft_s=1e-9)
    write_records([record], tmp_path / "records.csv")
    assert read_records(tmp_path / "records.csv") == [record]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_recomputed_tokens_are_kept_and_files_from_before_them_are_read(suffix: str, tmp_path: Path) -> None:
    records = [dataclasses.replace(record, num_recomputed=3) for record in Greedy(0).record("a", 4)]
    path = tmp_path / f"records.{suffix}"
    write_records(records, path)
    assert read_records(path) == records
    if suffix == "csv":
        path.write_text("\n".join(line.rsplit(",", 1)[0] for line in path.read_text().splitlines()) + "\n")
        assert {record.num_recomputed for record in read_records(path)} == {0}
