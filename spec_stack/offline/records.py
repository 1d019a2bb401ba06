"""StepRecords to and from CSV and Parquet. Loads no torch; pyarrow only when a Parquet file is named.

The columns are those of the SpecKV authors' step results, under their names, and ours beside them, so that `read_steps`
loads both alike. A drafted token needs no row of its own: token i of a step sits at `position` + i of its
request's output, it is right for i < accepted, wrong for i == accepted, and beyond that it follows a wrong token.
Signals per token are stored in full precision, so a written record is read back equal.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.offline.record_rows import Row, load_pyarrow, read_rows

PUBLISHED_COLUMNS = (
    "compression",
    "gamma",
    "task",
    "step",
    "accepted",
    "acceptance_rate",
    "tokens_produced",
    "mean_draft_entropy",
    "mean_draft_confidence",
    "max_draft_entropy",
    "min_draft_confidence",
)
COLUMNS = (
    *PUBLISHED_COLUMNS,
    "request_id",
    "policy",
    "is_prefill",
    "keep_rate",
    "position",
    "draft_s",
    "verify_s",
    "controller_s",
    "draft_read_prompt",
    "draft_entropy",
    "draft_confidence",
    "num_replayed",
)
# Files from before the last column was added are read as well.
_REQUIRED_COLUMNS = COLUMNS[:-1]


@dataclass(frozen=True)
class StepTable:
    """Decode steps that drafted something, as columns: what the authors' file and ours have in common.

    run numbers the runs in file order: a new one begins wherever `step` does not go on counting.
    gamma is the column as written: tokens really proposed in our files, the loop's setting in the authors'
    (theirs overstates the last step of a run).
    """

    precision: np.ndarray[Any, Any]
    task: np.ndarray[Any, Any]
    run: np.ndarray[Any, Any]
    step: np.ndarray[Any, Any]
    gamma: np.ndarray[Any, Any]
    num_accepted: np.ndarray[Any, Any]
    num_tokens: np.ndarray[Any, Any]
    acceptance_rate: np.ndarray[Any, Any]
    mean_entropy: np.ndarray[Any, Any]
    mean_confidence: np.ndarray[Any, Any]
    max_entropy: np.ndarray[Any, Any]
    min_confidence: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.gamma)


def write_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Write records, the steps of each run together and in order, to a .csv or .parquet file (overwritten).

    Raises ValueError for no records, for another suffix, and for a run whose steps are mixed up.
    """
    path = Path(path)
    records = list(records)
    if not records:
        raise ValueError(f"{path}: no records to write")
    _check_runs(records, [f"record {index}" for index in range(len(records))])
    positions: dict[tuple[str, ...], int] = {}
    rows = []
    for record in records:
        run = _run_key(record)
        position = positions.get(run, 0)
        positions[run] = position + record.num_tokens
        rows.append(_as_row(record, position))
    # Written beside and then moved, so that a failure leaves the earlier file whole.
    unfinished = path.with_name(path.name + ".unfinished")
    if path.suffix == ".csv":
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pyarrow, parquet = load_pyarrow(path)
        table = pyarrow.table({name: [row[name] for row in rows] for name in COLUMNS})
        parquet.write_table(table, unfinished, compression="zstd")
    else:
        raise ValueError(f"{path}: give a .csv or a .parquet file")
    unfinished.replace(path)


def check_record_path(path: str | Path, request_id: str | None = None) -> None:
    """Raise ValueError, before any long work, for a path that records could not be added to: no folder, another kind
    of file, a damaged one, or one that has this request's records already."""
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{path}: give a .csv or a .parquet file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; give a file")
    if path.suffix == ".parquet":
        load_pyarrow(path)
    if path.exists() and any(record.request_id == request_id for record in read_records(path)):
        raise ValueError(f"{path}: request {request_id!r} is in the file already; give another request_id")


_adding = Lock()


def add_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Write records to a file, after those it already holds. The whole file is rewritten: for many requests collect
    the records and call `write_records` once. Raises ValueError as `read_records` and `write_records` do."""
    with _adding:
        earlier = read_records(path) if Path(path).exists() else []
        write_records([*earlier, *records], path)


def read_records(*paths: str | Path) -> list[StepRecord]:
    """Read the records of one or more files written by `write_records`.

    Raises ValueError that names file, row and column for an empty file, missing columns, NaN, unknown
    precision or gamma, cells that contradict each other, and runs that are mixed up or in two files.
    """
    records: list[StepRecord] = []
    places: list[str] = []
    for path in paths:
        for row in read_rows(Path(path), _REQUIRED_COLUMNS):
            records.append(_as_record(row))
            places.append(row.place)
    _check_runs(records, places)
    return records


def read_steps(*paths: str | Path) -> StepTable:
    """Read the columns our files share with the authors', from either; prefill and gamma 0 steps are left out.

    Raises ValueError as `read_records` does.
    """
    columns: dict[str, list[Any]] = {name: [] for name in StepTable.__dataclass_fields__}
    run = -1
    for path in paths:
        expected = -1
        for row in read_rows(Path(path), PUBLISHED_COLUMNS):
            step, gamma, num_accepted = row.count("step"), row.gamma(), row.count("accepted")
            if step != expected:
                run += 1
            expected = step + 1
            if num_accepted > gamma:
                raise row.error("accepted", f"{num_accepted} accepted of {gamma} proposed")
            if gamma == 0 or row.cells.get("is_prefill") == "True":
                continue
            values: dict[str, Any] = {
                "precision": row.precision(),
                "task": row.cells["task"],
                "run": run,
                "step": step,
                "gamma": gamma,
                "num_accepted": num_accepted,
                "num_tokens": row.count("tokens_produced"),
                "acceptance_rate": row.real("acceptance_rate"),
                "mean_entropy": row.real("mean_draft_entropy"),
                "mean_confidence": row.real("mean_draft_confidence"),
                "max_entropy": row.real("max_draft_entropy"),
                "min_confidence": row.real("min_draft_confidence"),
            }
            for name, value in values.items():
                columns[name].append(value)
    return StepTable(**{name: np.array(values) for name, values in columns.items()})


def _run_key(record: StepRecord) -> tuple[str, ...]:
    return (record.request_id, record.policy, record.precision, str(record.keep_rate))


def _as_row(record: StepRecord, position: int) -> dict[str, Any]:
    signals = record.signals
    drafted = len(signals) > 0
    return {
        "compression": record.precision,
        "gamma": record.gamma,
        "task": record.task,
        "step": record.step,
        "accepted": record.num_accepted,
        "acceptance_rate": record.num_accepted / record.gamma if record.gamma else None,
        "tokens_produced": record.num_tokens,
        "mean_draft_entropy": signals.mean_entropy if drafted else None,
        "mean_draft_confidence": signals.mean_confidence if drafted else None,
        "max_draft_entropy": signals.max_entropy if drafted else None,
        "min_draft_confidence": signals.min_confidence if drafted else None,
        "request_id": record.request_id,
        "policy": record.policy,
        "is_prefill": record.is_prefill,
        "keep_rate": record.keep_rate,
        "position": position,
        "draft_s": record.draft_s,
        "verify_s": record.verify_s,
        "controller_s": record.controller_s,
        "draft_read_prompt": record.draft_read_prompt,
        "draft_entropy": " ".join(map(repr, map(float, signals.entropy))),
        "draft_confidence": " ".join(map(repr, map(float, signals.confidence))),
        "num_replayed": record.num_recomputed,
    }


def _as_record(row: Row) -> StepRecord:
    record = StepRecord(
        request_id=row.text("request_id"),
        step=row.count("step"),
        policy=row.text("policy"),
        precision=row.precision(),
        task=row.cells["task"],
        is_prefill=row.flag("is_prefill"),
        keep_rate=row.share("keep_rate"),
        gamma=row.gamma(),
        num_accepted=row.count("accepted"),
        num_tokens=row.count("tokens_produced"),
        signals=DraftSignals(row.reals("draft_entropy"), row.reals("draft_confidence")),
        draft_s=row.seconds("draft_s"),
        verify_s=row.seconds("verify_s"),
        controller_s=row.seconds("controller_s"),
        draft_read_prompt=row.flag("draft_read_prompt"),
        num_recomputed=row.count("num_replayed") if "num_replayed" in row.cells else 0,
    )
    for column, signals in (("draft_entropy", record.signals.entropy), ("draft_confidence", record.signals.confidence)):
        if len(signals) != record.gamma:
            raise row.error(column, f"{len(signals)} values for {record.gamma} drafted tokens")
    if record.num_accepted > record.gamma:
        raise row.error("accepted", f"{record.num_accepted} accepted of {record.gamma} proposed")
    if record.num_tokens > record.num_accepted + 1:
        raise row.error("tokens_produced", f"{record.num_tokens} tokens from {record.num_accepted} accepted ones")
    return record


def _check_runs(records: Sequence[StepRecord], places: Sequence[str]) -> None:
    """A run is one request under one policy, precision and keep_rate; its steps stand together, counted up."""
    seen: set[tuple[str, ...]] = set()
    last: StepRecord | None = None
    for record, place in zip(records, places, strict=True):
        run = _run_key(record)
        if last is not None and run == _run_key(last):
            if record.step != last.step + 1:
                raise ValueError(
                    f"{place}, column 'step': {record.step} after {last.step} in request {record.request_id!r}; "
                    f"a run's steps must be complete, in order and recorded once"
                )
            if record.task != last.task:
                raise ValueError(
                    f"{place}, column 'task': {record.task!r} after {last.task!r} in request {record.request_id!r}"
                )
        elif run in seen:
            raise ValueError(
                f"{place}, column 'request_id': the run of request {record.request_id!r} under {record.policy!r} "
                f"({record.precision}) appears a second time; keep one run per request and policy"
            )
        seen.add(run)
        last = record
