"""The SpecKV authors' CSVs: their steps as columns, and the seconds of their runs. None of their data is kept here."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

PUBLISHED_COLUMNS = {
    "compression": "precision",
    "gamma": "gamma",
    "task": "task",
    "accepted": "num_accepted",
    "acceptance_rate": "acceptance_rate",
    "tokens_produced": "num_tokens",
    "mean_draft_entropy": "mean_entropy",
    "mean_draft_confidence": "mean_confidence",
    "max_draft_entropy": "max_entropy",
    "min_draft_confidence": "min_confidence",
}
"""The authors' name of a column -> the table's."""
STEPS_FILE = "phase2_step_results.csv"
RUNS_FILE = "phase2_experiment_results.csv"
SOURCE = "https://github.com/Amorfati123/SpecKV"
"""The authors' repository, as the paper's reproducibility statement names it; its folder `results` has the files."""
_KINDS: Mapping[str, type] = {
    "compression": str,
    "task": str,
    **dict.fromkeys(("gamma", "accepted", "tokens_produced", "num_tokens"), int),
}
"""Of a column's cells; the others are fractions."""
_RUN_COLUMNS = ("compression", "task", "gamma", "num_tokens", "elapsed_sec")


StepTable = np.recarray[Any, Any]
"""Decode steps that drafted something, a field (n,) for each column. gamma is the loop's setting: the last step of a
run may have proposed fewer tokens."""


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder without the authors' files, with the place that has them."""
    missing = [name for name in (STEPS_FILE, RUNS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {' and '.join(missing)}; git clone {SOURCE} and give its folder results")


def read_steps(path: Path) -> StepTable:
    """Read a step file of the authors'. Raises ValueError as `_read` does."""
    rows = _read(path, PUBLISHED_COLUMNS)
    arrays = {name: np.array([row[column] for row in rows]) for column, name in PUBLISHED_COLUMNS.items()}
    dtype = np.dtype([(name, array.dtype) for name, array in arrays.items()])
    found: np.recarray[Any, Any] = np.rec.fromarrays(list(arrays.values()), dtype=dtype)
    return found


def _read(path: Path, columns: Collection[str]) -> list[dict[str, Any]]:
    """A file's rows, of these columns. Raises ValueError for an empty file, a missing column, and with the line for a
    missing cell and what is no finite number."""
    # utf-8-sig: spreadsheets put a byte order mark first.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: missing columns {', '.join(missing)}")
        rows = [
            {name: _value(cells[name], name, f"{path}, line {reader.line_num}") for name in columns} for cells in reader
        ]
    if not rows:
        raise ValueError(f"{path}: no rows below the header")
    return rows


def _value(cell: str | None, column: str, place: str) -> Any:
    try:
        value = _KINDS.get(column, float)(cell or "")
    except ValueError:
        value = None
    if value in (None, "") or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"{place}: {column} cannot be {cell!r}")
    return value


def best_gammas(path: Path) -> dict[tuple[str, str], int]:
    """The gamma with most tokens/s, per (precision, task), of the authors' file of runs; as their Table 1 has it.

    It averages the rounded tokens/s of runs; seconds and tokens give the same ranking. Raises ValueError as `_read`.
    """
    speeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _read(path, _RUN_COLUMNS):
        speeds[row["compression"], row["task"]][row["gamma"]].append(row["num_tokens"] / row["elapsed_sec"])
    means = {key: {gamma: float(np.mean(own)) for gamma, own in of.items()} for key, of in speeds.items()}
    return {key: max(of, key=of.__getitem__) for key, of in means.items()}
