"""The SpecKV authors' CSVs: their steps as columns, and the seconds of their runs. None of their data is kept here."""

from __future__ import annotations

import csv
from collections import defaultdict
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
_TEXTS = ("precision", "task")
_COUNTS = ("gamma", "num_accepted", "num_tokens")


StepTable = np.recarray[Any, Any]
"""Decode steps that drafted something, a field (n,) for each column. gamma is the loop's setting: the last step of a
run may have proposed fewer tokens."""


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder without the authors' files, with the place that has them."""
    missing = [name for name in (STEPS_FILE, RUNS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {' and '.join(missing)}; git clone {SOURCE} and give its folder results")


def read_steps(path: Path) -> StepTable:
    """Read a step file of the authors'. Raises ValueError for an empty file, a missing column and what is no number."""
    # utf-8-sig: spreadsheets put a byte order mark first.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in PUBLISHED_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: missing columns {', '.join(missing)}")
        rows = [{name: cells[column] for column, name in PUBLISHED_COLUMNS.items()} for cells in reader]
    if not rows:
        raise ValueError(f"{path}: no rows below the header")
    columns = {name: np.array([row[name] for row in rows]) for name in PUBLISHED_COLUMNS.values()}
    numbers = {
        name: values.astype(int if name in _COUNTS else float) for name, values in columns.items() if name not in _TEXTS
    }
    arrays = columns | numbers
    dtype = np.dtype([(name, array.dtype) for name, array in arrays.items()])
    found: np.recarray[Any, Any] = np.rec.fromarrays(list(arrays.values()), dtype=dtype)
    return found


def best_gammas(path: Path) -> dict[tuple[str, str], int]:
    """The gamma with most tokens/s, per (precision, task), of the authors' file of runs; as their Table 1 has it.

    It averages the rounded tokens/s of runs; seconds and tokens give the same ranking.
    """
    speeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8-sig") as file:
        for cells in csv.DictReader(file):
            own = speeds[cells["compression"], cells["task"]]
            own[int(cells["gamma"])].append(int(cells["num_tokens"]) / float(cells["elapsed_sec"]))
    means = {key: {gamma: float(np.mean(own)) for gamma, own in of.items()} for key, of in speeds.items()}
    return {key: max(of, key=of.__getitem__) for key, of in means.items()}
