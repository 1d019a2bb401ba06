"""StepRecords in JSON Lines files. Loads no torch. A line is `dataclasses.asdict` of a record, readable by
`pandas.read_json(path, lines=True)` and exact on reading back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from spec_stack.controller.base import DraftSignals, StepRecord

_FIELDS = {entry.name: str(entry.type) for entry in fields(StepRecord)}
# Later fields have a default, and are missing in older files.
_REQUIRED = tuple(entry.name for entry in fields(StepRecord) if entry.default is MISSING)
_SIGNALS = tuple(entry.name for entry in fields(DraftSignals))
# A field of older files.
_DROPPED = "upcoming"
_TAIL_BYTES = 1 << 20


def add_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Append records to a .jsonl file, created if missing.

    All lines are appended in one write, so several threads and processes of one machine may share a file.

    Parameters
    ----------
    records : iterable of StepRecord
        The steps of whole runs, grouped by run and in order. A run is one request under one policy.
    path : str or Path
        The file.

    Raises
    ------
    ValueError
        For another suffix, and for a value that `read_records` rejects.
    OSError
        If the disk is full; the file's last line is then incomplete.
    """
    path, records = Path(path), list(records)
    _check_suffix(path)
    for index, record in enumerate(records):
        _check(record, f"record {index}")
    block = "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        num_written = os.write(file, block)
    finally:
        os.close(file)
    if num_written < len(block):
        raise OSError(f"{path}: {num_written} of {len(block)} bytes were written; remove the unfinished last line")


def read_records(*paths: str | Path) -> list[StepRecord]:
    """Read the records of one or more .jsonl files.

    Returns
    -------
    list of StepRecord
        In the order of the files and of their lines.

    Raises
    ------
    ValueError
        With file, line and field: for an empty or damaged file, missing or extra fields, and values of another type or
        out of range (NaN included).
    """
    records: list[StepRecord] = []
    for path in map(Path, paths):
        _check_suffix(path)
        with path.open("rb") as file:
            found = [_parse(line, f"{path}, line {number}") for number, line in enumerate(file, 1)]
        if not found:
            raise ValueError(f"{path}: no records in the file; record at least one step")
        records += found
    return records


def check_record_path(path: str | Path, request_id: str | None = None) -> None:
    """Raise ValueError, before any long work, for a path that records cannot be appended to.

    Rejected: another suffix than .jsonl, a missing folder, a folder, an invalid last line, and with request_id, a file
    that contains its records.
    """
    path = Path(path)
    _check_suffix(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; give a file")
    if not path.exists():
        return
    _check_end(path)
    # A byte search: parsing a long file would take seconds.
    if request_id is not None and f'"request_id": {json.dumps(request_id)}'.encode() in path.read_bytes():
        raise ValueError(f"{path}: request {request_id!r} is in the file already; give another request_id")


def _check_suffix(path: Path) -> None:
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: give a .jsonl file; pandas.read_json(path, lines=True).to_parquet converts one")
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: give a .jsonl file")


def _check_end(path: Path) -> None:
    """Raise ValueError for a file that cannot be appended to."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        end = file.read()
    if end and not end.endswith(b"\n"):
        raise ValueError(f"{path}: the last line is not finished; remove it, or give another file")
    if end:
        _parse(end.splitlines()[-1], f"{path}, last line")


def _parse(line: bytes, place: str) -> StepRecord:
    """A line's record."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a JSON object is needed, got {type(row).__name__}")
    return as_record(row, place)


def as_record(row: Mapping[str, Any], place: str) -> StepRecord:
    """A record from a dict. Raises ValueError with the place and the field."""
    if missing := [name for name in _REQUIRED if name not in row]:
        raise ValueError(f"{place}: missing fields {', '.join(missing)}; `records=` of generate writes such files")
    names = [name for name in row if name != _DROPPED]
    if unknown := [name for name in names if name not in _FIELDS]:
        raise _error(place, unknown[0], "unknown; was the file written by a newer version?")
    record = StepRecord(**{name: _value(row[name], _FIELDS[name], place, name) for name in names})
    _check(record, place)
    return record


def _value(value: Any, kind: str, place: str, name: str) -> Any:
    """A field's value; signals are parsed from their dict."""
    if kind == "DraftSignals":
        return _signals(value, place, name)
    if kind == "float" and type(value) is int:
        return float(value)
    if type(value).__name__ != kind:
        raise _error(place, name, f"{value!r} is no {kind}")
    return value


def _signals(value: Any, place: str, name: str) -> DraftSignals:
    if not isinstance(value, dict) or [type(value.get(each)) for each in _SIGNALS] != [list] * len(_SIGNALS):
        raise _error(place, name, f"lists of {' and '.join(_SIGNALS)} are needed, got {value!r}")
    return DraftSignals(*([_value(it, "float", place, f"{name}.{each}") for it in value[each]] for each in _SIGNALS))


def _check(record: StepRecord, place: str) -> None:
    for name, problem in _problems(record):
        raise _error(place, name, problem)


def _problems(record: StepRecord) -> Iterator[tuple[str, str]]:
    """Out-of-range and contradictory values: field and problem."""
    if not 0 < record.keep_rate <= 1:
        yield "keep_rate", f"{record.keep_rate} is no share; it must be in (0, 1]"
    for name, kind in _FIELDS.items():
        value = getattr(record, name)
        if kind == "int" and value < 0:
            yield name, f"{value} is not a count"
        if kind == "float" and not 0 <= value < math.inf:
            yield name, f"{value} must be finite and 0 or more"
    if not record.request_id:
        yield "request_id", "empty"
    if record.num_ngram_tokens > record.gamma:
        yield "num_ngram_tokens", f"{record.num_ngram_tokens} of {record.gamma} proposed tokens"
    if record.num_accepted > record.gamma:
        yield "num_accepted", f"{record.num_accepted} accepted of {record.gamma} proposed"
    if record.num_tokens > record.num_accepted + 1:
        yield "num_tokens", f"{record.num_tokens} tokens from {record.num_accepted} accepted ones"
    yield from _signal_problems(record)


def _signal_problems(record: StepRecord) -> Iterator[tuple[str, str]]:
    for name in _SIGNALS:
        values: Sequence[float] = getattr(record.signals, name)
        if len(values) != record.num_drafted:
            yield f"signals.{name}", f"{len(values)} values for {record.num_drafted} drafted tokens"
        if not all(map(math.isfinite, values)):
            yield f"signals.{name}", f"a value is not finite in {values}"


def _error(place: str, name: str, problem: str) -> ValueError:
    return ValueError(f"{place}, field {name!r}: {problem}")
