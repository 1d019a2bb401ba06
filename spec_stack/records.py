"""StepRecords in JSON Lines files. Loads no torch. A line is `dataclasses.asdict` of a record, readable by
`pandas.read_json(path, lines=True)` and exact on reading back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from spec_stack.controller.base import DraftSignals, StepRecord

# By annotation, which is a string.
_KINDS: Mapping[Any, type] = {"str": str, "int": int, "float": Real, "bool": bool}


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
        For another suffix, and for numbers that are not finite.
    OSError
        If the disk is full; the file's last line is then incomplete.
    """
    _check_suffix(Path(path))
    block = "".join(json.dumps(asdict(record), allow_nan=False) + "\n" for record in records).encode()
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
        With file and line: for an empty or damaged file, missing or extra fields, values of another kind, numbers that
        are not finite, and contradictory counts.
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


def check_record_path(path: str | Path) -> None:
    """Raise ValueError, before any long work, for a path that records cannot be appended to: one with another suffix
    than .jsonl, in a missing folder, of a folder, or of a file with an unfinished last line.
    """
    path = Path(path)
    _check_suffix(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; give a file")
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            raise ValueError(f"{path}: the last line is not finished; remove it, or give another file")


def _check_suffix(path: Path) -> None:
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: give a .jsonl file; pandas.read_json(path, lines=True).to_parquet converts one")
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: give a .jsonl file")


def _parse(line: bytes, place: str) -> StepRecord:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    return as_record(row, place)


def as_record(row: Mapping[str, Any], place: str) -> StepRecord:
    """A record from a dict. Raises ValueError with the place."""
    try:
        record = StepRecord(**{**row, "signals": DraftSignals(**row["signals"])})
        num_signals = {len(record.signals.entropy), len(record.signals.confidence)}
        fits = num_signals == {record.num_drafted} and record.num_tokens <= record.num_accepted + 1 <= record.gamma + 1
    except KeyError as error:
        raise ValueError(f"{place}: no record of a step (it has no {error})") from error
    except TypeError as error:
        raise ValueError(f"{place}: no record of a step ({error})") from error
    named = [(each.name, getattr(record, each.name), _KINDS.get(each.type, object)) for each in fields(StepRecord)]
    named += [(name, value, Real) for name, values in asdict(record.signals).items() for value in values]
    for name, value, kind in named:
        if not isinstance(value, kind) or (isinstance(value, float) and not isfinite(value)):
            raise ValueError(f"{place}: {name} cannot be {value!r}")
    if not fits:
        raise ValueError(f"{place}: its numbers of proposed, accepted and output tokens contradict each other")
    return record
