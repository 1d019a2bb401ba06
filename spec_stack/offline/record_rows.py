"""Rows of record files, CSV or Parquet, as text cells that know their place. Loads no torch."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_stack.config import MAX_GAMMA, OTHER_PRECISION, PRECISIONS


@dataclass(frozen=True)
class Row:
    """One row's cells as text, with the place to name when one of them is wrong."""

    place: str
    cells: Mapping[str, str]

    def error(self, column: str, problem: str) -> ValueError:
        return ValueError(f"{self.place}, column {column!r}: {problem}")

    def text(self, column: str) -> str:
        value = self.cells[column]
        if not value:
            raise self.error(column, "empty")
        return value

    def real(self, column: str) -> float:
        return self._number(column, self.text(column))

    def _number(self, column: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise self.error(column, f"{text} is not finite; drop the row or measure the step again")
        return value

    def seconds(self, column: str) -> float:
        value = self.real(column)
        if value < 0:
            raise self.error(column, f"{value} is negative; seconds are 0 or more")
        return value

    def share(self, column: str) -> float:
        value = self.real(column)
        if not 0 < value <= 1:
            raise self.error(column, f"{value} is no share; it must be in (0, 1]")
        return value

    def count(self, column: str) -> int:
        value = self.real(column)
        if value < 0 or value != int(value):
            raise self.error(column, f"{value} is not a count")
        return int(value)

    def flag(self, column: str) -> bool:
        value = self.text(column)
        if value not in ("True", "False"):
            raise self.error(column, f"{value!r} is neither True nor False")
        return value == "True"

    def reals(self, column: str) -> list[float]:
        return [self._number(column, part) for part in self.cells[column].split()]

    def precision(self) -> str:
        value = self.text("compression")
        known = (*PRECISIONS, OTHER_PRECISION)
        if value not in known:
            raise self.error("compression", f"unknown precision {value!r}; known: {', '.join(known)}")
        return value

    def gamma(self) -> int:
        value = self.count("gamma")
        if value > MAX_GAMMA and self.cells.get("is_prefill") != "True":
            raise self.error("gamma", f"unknown gamma {value}; it must be 0 to {MAX_GAMMA}")
        return value


def read_rows(path: Path, required: Sequence[str]) -> Iterable[Row]:
    """The rows of a file that has the required columns. Raises ValueError naming the file where it is none."""
    if path.suffix == ".csv":
        rows = _read_csv(path, required)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path, required)
    else:
        raise ValueError(f"{path}: give a .csv or a .parquet file")
    if not rows:
        raise ValueError(f"{path}: no rows below the header; record at least one step")
    return rows


def _check_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in names]
    if missing:
        raise ValueError(f"{path}: missing columns {', '.join(missing)}; records are written by `write_records`")


def _read_csv(path: Path, required: Sequence[str]) -> list[Row]:
    try:
        # utf-8-sig: spreadsheets put a byte order mark first.
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse_csv(path, csv.reader(file), required)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file ({error})") from None


def _parse_csv(path: Path, reader: Any, required: Sequence[str]) -> list[Row]:
    header = next(reader, None)
    if header is None:
        raise ValueError(f"{path}: the file is empty; it has not even a header")
    _check_columns(path, header, required)
    rows = []
    for cells in reader:
        place = f"{path}, line {reader.line_num}"
        if cells == header:
            raise ValueError(f"{place}: a second header; give files one by one instead of joining them")
        if len(cells) != len(header):
            raise ValueError(f"{place}: {len(cells)} cells under {len(header)} columns")
        rows.append(Row(place, dict(zip(header, cells, strict=True))))
    return rows


def _read_parquet(path: Path, required: Sequence[str]) -> list[Row]:
    pyarrow, parquet = load_pyarrow(path)
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from None
    _check_columns(path, table.column_names, required)
    return [
        Row(f"{path}, row {index}", {name: "" if value is None else str(value) for name, value in cells.items()})
        for index, cells in enumerate(table.to_pylist())
    ]


def load_pyarrow(path: Path) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, or ImportError saying what needs them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow (pip install pyarrow); CSV needs nothing") from error
    return pyarrow, pyarrow.parquet
