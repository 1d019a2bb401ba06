"""Rows of a long run: one per prompt and arm, written as soon as it is there, so that a run goes on where it ended."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from spec_stack import SpecStackGenerator
from spec_stack.hf.model import CachedModel

Row = dict[str, Any]


class Rows:
    """A file of JSON lines, each with "key" and "arm".

    Parameters
    ----------
    path : Path
        Read where it is there; rows are added at its end.
    minutes : float
        How long this run may begin new work.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self._path, self._until = path, monotonic() + 60 * minutes
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._rows = {(row["key"], row["arm"]): row for row in map(json.loads, lines)}

    @property
    def has_time(self) -> bool:
        """Tell whether new work may begin."""
        return monotonic() < self._until

    def __contains__(self, key_and_arm: tuple[str, str]) -> bool:
        return key_and_arm in self._rows

    def left(self, key: str, arms: Mapping[str, Any]) -> dict[str, Any]:
        """The arms that have no row of a key yet; none where no new work may begin."""
        return {arm: what for arm, what in arms.items() if (key, arm) not in self} if self.has_time else {}

    def num_left(self, keys: Iterable[str], arms: Iterable[str]) -> int:
        """How many rows of some keys and arms there are not."""
        return sum((key, arm) not in self for key, arm in product(keys, list(arms)))

    def add(self, key: str, arm: str, values: Mapping[str, Any]) -> Row:
        """Keep a row, on disk at once."""
        row = {"key": key, "arm": arm, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._rows[key, arm] = row
        return row

    def of_arm(self, arm: str) -> dict[str, Row]:
        """All rows of an arm, by key."""
        return {key: row for (key, other), row in self._rows.items() if other == arm}

    def pairs(self, arm: str, other: str) -> list[tuple[Row, Row]]:
        """The rows of two arms, where both have one."""
        others = self.of_arm(other)
        return [(row, others[key]) for key, row in self.of_arm(arm).items() if key in others]


def add_row_arguments(parser: argparse.ArgumentParser, limited: bool = True) -> None:
    """The options of every resumable script. limited: whether it takes as many prompts as there are."""
    parser.add_argument("--rows", type=Path, required=True, help="file of rows; a run goes on after those it holds")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no prompt after so many (no limit)")
    if limited:
        parser.add_argument("--limit", type=int, help="most prompts (default: all)")


def first_divergence(
    generator: SpecStackGenerator, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> tuple[int, float] | None:
    """Where two answers part, and by how much the target prefers the plain one's token there, in logits.

    Returns
    -------
    (int, float) or None
        None where one of the two begins the other. The gap is that of a dense forward over prompt and common answer.
    """
    at = next((index for index, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return None
    ids = [*prompt_ids, *plain[:at]]
    target = CachedModel(generator.target, generator.config.prefill.prefill_chunk)
    logits: torch.Tensor = target.forward(ids, range(len(ids)), 1)[-1].float()
    return at, float(logits[plain[at]] - logits[other[at]])
