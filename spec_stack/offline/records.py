"""StepRecords in files: JSON Lines to append to, Parquet for analysis. Loads no torch; pyarrow for Parquet only.

A line is `dataclasses.asdict` of one record, so pandas.read_json(path, lines=True) reads a file too; a Parquet file has
the same fields for columns. A drafted token needs no row of its own: token i of a step stands at i plus the tokens of
the run's earlier steps, it is right for i < num_accepted, wrong for i == num_accepted, and beyond that it follows a
wrong token. Numbers are stored in full precision, so a record is read back equal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from spec_stack.config import MAX_GAMMA, MAX_LOOKED_UP, OTHER_PRECISION, PRECISIONS
from spec_stack.controller.base import DraftSignals, StepRecord

PROPOSERS = ("model", "lookup", "model+lookup")
"""Who a record may say proposed."""
SUFFIXES = (".jsonl", ".parquet")
_FIELDS = {entry.name: str(entry.type) for entry in fields(StepRecord)}
# A field that came later has a default, and is not in older files.
_REQUIRED = tuple(entry.name for entry in fields(StepRecord) if entry.default is MISSING)
_SIGNALS = tuple(entry.name for entry in fields(DraftSignals))
_TAIL_BYTES = 1 << 20


def write_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Write records to a .jsonl or .parquet file, which is overwritten.

    Parameters
    ----------
    records : iterable of StepRecord
        The steps of each run together and in order. A run is one request under one policy, precision and keep_rate.
    path : str or Path
        Of the file. It is replaced at once, so a failure leaves the earlier one whole.

    Raises
    ------
    ValueError
        For no records, another suffix, a value that `read_records` would refuse, and a run whose steps are mixed up.
    """
    path, records = Path(path), list(records)
    _check_suffix(path, SUFFIXES)
    if not records:
        raise ValueError(f"{path}: no records to write")
    _check(records, [f"record {index}" for index in range(len(records))])
    unfinished = path.with_name(path.name + ".unfinished")
    if path.suffix == ".parquet":
        pyarrow, parquet = _load_pyarrow(path)
        rows = [asdict(record) for record in records]
        parquet.write_table(pyarrow.Table.from_pylist(rows, _schema(pyarrow)), unfinished, compression="zstd")
    else:
        unfinished.write_bytes(_lines(records))
    unfinished.replace(path)


def add_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Append the records of whole runs to a .jsonl file, which is made where there is none.

    Takes no longer for a long file. Several threads and processes may append to one file, as long as it lies on this
    machine: all lines go out in one write, which the system puts at the end undivided.

    Raises
    ------
    ValueError
        As `write_records`, and for a suffix other than .jsonl.
    OSError
        Where the disk does not take all of it; the file's last line is unfinished then.
    """
    path, records = Path(path), list(records)
    _check_suffix(path, SUFFIXES[:1])
    _check(records, [f"record {index}" for index in range(len(records))])
    block = _lines(records)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        num_written = os.write(file, block)
    finally:
        os.close(file)
    if num_written < len(block):
        raise OSError(f"{path}: {num_written} of {len(block)} bytes were written; remove the unfinished last line")


def check_record_path(
    path: str | Path, request_id: str | None = None, *, suffixes: Sequence[str] = SUFFIXES[:1]
) -> None:
    """Raise ValueError, before any long work, for a path that records could not be written to.

    Parameters
    ----------
    path : str or Path
        Refused where its suffix is another, its folder is not there, it is a folder itself, or a .jsonl file whose last
        line is no record.
    request_id : str, optional
        Refused where a .jsonl file has records of it. The file is searched for it; without one, its end alone is read.
    suffixes : sequence of str
        Those allowed: `add_records` takes .jsonl, `write_records` takes SUFFIXES.
    """
    path = Path(path)
    _check_suffix(path, suffixes)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; give a file")
    if path.suffix == ".parquet":
        _load_pyarrow(path)
    elif path.exists():
        _check_end(path)
        # As it stands in the lines: a search of bytes, since reading would take seconds for a long file.
        if request_id is not None and f'"request_id": {json.dumps(request_id)}'.encode() in path.read_bytes():
            raise ValueError(f"{path}: request {request_id!r} is in the file already; give another request_id")


def read_records(*paths: str | Path) -> list[StepRecord]:
    """Read the records of one or more files.

    Returns
    -------
    list of StepRecord
        In the order of the files and of their lines.

    Raises
    ------
    ValueError
        That names file, line and field: for an empty or damaged file, a field too few or too many, a value of another
        type or out of range (NaN is), values that contradict each other, and runs that are mixed up or in two files.
    """
    records: list[StepRecord] = []
    places: list[str] = []
    for path in map(Path, paths):
        _check_suffix(path, SUFFIXES)
        rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path))
        if not rows:
            raise ValueError(f"{path}: no records in the file; record at least one step")
        records += [_as_record(row, place) for place, row in rows]
        places += [place for place, _ in rows]
    _check(records, places)
    return records


def _lines(records: Iterable[StepRecord]) -> bytes:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def _check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix in suffixes:
        return
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: records are added to a .jsonl file; write_records makes a .parquet file of them")
    raise ValueError(f"{path}: give a .jsonl file" + (", or a .parquet file" if len(suffixes) > 1 else ""))


def _check_end(path: Path) -> None:
    """Raise ValueError for a file that a line cannot be appended to."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        end = file.read()
    if not end:
        return
    if not end.endswith(b"\n"):
        raise ValueError(f"{path}: the last line is not finished; remove it, or give another file")
    _as_record(_parse(end.splitlines()[-1], f"{path}, last line"), f"{path}, last line")


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            yield place, _parse(line, place)


def _parse(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a JSON object is needed, got {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    pyarrow, parquet = _load_pyarrow(path)
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from None
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _load_pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow (pip install pyarrow); JSON Lines need nothing") from error
    return pyarrow, pyarrow.parquet


def _schema(pyarrow: Any) -> Any:
    types = {"str": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}
    numbers = pyarrow.list_(pyarrow.float64())
    types["DraftSignals"] = pyarrow.struct([("entropy", numbers), ("confidence", numbers)])
    types["DraftSignals | None"] = types["DraftSignals"]
    return pyarrow.schema([(name, types[kind]) for name, kind in _FIELDS.items()])


def _error(place: str, name: str, problem: str) -> ValueError:
    return ValueError(f"{place}, field {name!r}: {problem}")


def _as_record(row: Mapping[str, Any], place: str) -> StepRecord:
    """A row as a record: its fields are there and of their types; what they say is not checked yet."""
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise ValueError(f"{place}: missing fields {', '.join(missing)}; records are written by this module")
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name not in _FIELDS:
            raise _error(place, name, "unknown; was the file written by a newer version?")
        if name in ("signals", "upcoming"):
            values[name] = None if name == "upcoming" and value is None else _signals(value, place, name)
        else:
            values[name] = _typed(value, _FIELDS[name], place, name)
    return StepRecord(**values)


def _signals(value: Any, place: str, field: str) -> DraftSignals:
    if not isinstance(value, dict) or [type(value.get(name)) for name in _SIGNALS] != [list] * len(_SIGNALS):
        raise _error(place, field, f"lists of {' and '.join(_SIGNALS)} are needed, got {value!r}")
    return DraftSignals(
        *([_typed(each, "float", place, f"{field}.{name}") for each in value[name]] for name in _SIGNALS)
    )


def _typed(value: Any, kind: str, place: str, name: str) -> Any:
    if kind == "float" and type(value) is int:
        return float(value)
    if type(value).__name__ != kind:
        raise _error(place, name, f"{value!r} is no {kind}")
    return value


def _check(records: Sequence[StepRecord], places: Sequence[str]) -> None:
    for record, place in zip(records, places, strict=True):
        for name, problem in _problems(record):
            raise _error(place, name, problem)
    _check_runs(records, places)


def _problems(record: StepRecord) -> Iterator[tuple[str, str]]:
    """Values out of range, and values that contradict each other: field and problem."""
    for name in ("request_id", "policy"):
        if not getattr(record, name):
            yield name, "empty"
    known = (*PRECISIONS, OTHER_PRECISION)
    if record.precision not in known:
        yield "precision", f"unknown precision {record.precision!r}; known: {', '.join(known)}"
    counts = ("step", "gamma", "num_accepted", "num_tokens", "num_recomputed", "num_unread", "num_looked_up")
    for name in (*counts, "num_target_slots", "num_draft_slots", "num_prefilled"):
        if getattr(record, name) < 0:
            yield name, f"{getattr(record, name)} is not a count"
    if record.num_looked_up > record.gamma:
        yield "num_looked_up", f"{record.num_looked_up} of {record.gamma} proposed tokens"
    # In a prefill step it is the look-ahead.
    elif record.num_drafted > MAX_GAMMA and not record.is_prefill:
        yield "gamma", f"unknown gamma {record.num_drafted}; it must be 0 to {MAX_GAMMA}"
    if record.num_looked_up > MAX_LOOKED_UP:
        yield "num_looked_up", f"{record.num_looked_up} is over {MAX_LOOKED_UP}"
    if record.proposer not in PROPOSERS:
        yield "proposer", f"unknown proposer {record.proposer!r}; known: {', '.join(PROPOSERS)}"
    for name in ("draft_s", "verify_s", "controller_s"):
        if not 0 <= getattr(record, name) < math.inf:
            yield name, f"{getattr(record, name)} is no duration: it must be finite and 0 or more"
    if not 0 < record.keep_rate <= 1:
        yield "keep_rate", f"{record.keep_rate} is no share; it must be in (0, 1]"
    if record.lag < 1:
        yield "lag", f"{record.lag}; what is known before a step is of an earlier one, so it is 1 or more"
    for name in _SIGNALS:
        values = getattr(record.signals, name)
        if len(values) != record.num_drafted:
            yield f"signals.{name}", f"{len(values)} values for {record.num_drafted} drafted tokens"
        if not all(map(math.isfinite, values)):
            yield f"signals.{name}", f"a value is not finite in {values}"
        upcoming = getattr(record.upcoming, name, [])
        if not all(map(math.isfinite, upcoming)):
            yield f"upcoming.{name}", f"a value is not finite in {upcoming}"
    if record.num_accepted > record.gamma:
        yield "num_accepted", f"{record.num_accepted} accepted of {record.gamma} proposed"
    if record.num_tokens > record.num_accepted + 1:
        yield "num_tokens", f"{record.num_tokens} tokens from {record.num_accepted} accepted ones"


def _run_key(record: StepRecord) -> tuple[str, str, str, float]:
    return record.request_id, record.policy, record.precision, record.keep_rate


def _check_runs(records: Sequence[StepRecord], places: Sequence[str]) -> None:
    """A run is one request under one policy, precision and keep_rate; its steps stand together, counted up."""
    seen: set[tuple[str, str, str, float]] = set()
    last: StepRecord | None = None
    for record, place in zip(records, places, strict=True):
        run = _run_key(record)
        if last is not None and run == _run_key(last):
            if record.step != last.step + 1:
                problem = f"{record.step} after {last.step} in request {record.request_id!r}"
                raise _error(place, "step", f"{problem}; a run's steps must be complete, in order and recorded once")
            if record.task != last.task:
                raise _error(place, "task", f"{record.task!r} after {last.task!r} in request {record.request_id!r}")
        elif run in seen:
            raise _error(
                place,
                "request_id",
                f"the run of request {record.request_id!r} under {record.policy!r} ({record.precision}) appears a "
                "second time; keep one run per request and policy",
            )
        seen.add(run)
        last = record
