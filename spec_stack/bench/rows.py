"""Rows of a long run: one per prompt and arm, written at once, so that the same command goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from spec_stack.hf.architectures import text_config
from spec_stack.prefill.calibration import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spec_stack.engine.pair import ModelPair

Row = dict[str, Any]


class Rows:
    """A file of JSON lines, each with "key" and "arm"; several runs may share it.

    path: read if it exists, and appended to; None keeps rows in memory. minutes: how long this run may begin new work.
    Raises ValueError with the line for a file of something else; a row that an interruption has cut off is skipped.
    """

    def __init__(self, path: Path | None, minutes: float) -> None:
        self._path, self._until = path, monotonic() + 60 * minutes
        self._rows: dict[tuple[str, str], Row] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        for number, line in enumerate(text.split("\n"), start=1):
            if not line:
                continue
            try:
                row = json.loads(line)
                self._rows[row["key"], row["arm"]] = row
            except (ValueError, TypeError, KeyError) as error:
                if not (isinstance(error, ValueError) and line.startswith("{")):
                    raise ValueError(f"{path}, line {number} is no row of a measurement: {error}") from error
        if text and not text.endswith("\n"):
            self._append("\n")

    @property
    def has_time(self) -> bool:
        """Whether new work may begin."""
        return monotonic() < self._until

    def __contains__(self, key_and_arm: tuple[str, str]) -> bool:
        return key_and_arm in self._rows

    def left(self, key: str, arms: Mapping[str, Any]) -> dict[str, Any]:
        """The arms without a row of a key; none where no new work may begin."""
        return {arm: what for arm, what in arms.items() if (key, arm) not in self} if self.has_time else {}

    def num_left(self, keys: Iterable[str], arms: Iterable[str]) -> int:
        """How many rows of these keys and arms are missing."""
        return sum((key, arm) not in self for key, arm in product(keys, list(arms)))

    def add(self, key: str, arm: str, values: Mapping[str, Any]) -> Row:
        """Keep a row, on disk at once, in one write."""
        row = {"key": key, "arm": arm, **values}
        self._append(json.dumps(row, ensure_ascii=False) + "\n")
        self._rows[key, arm] = row
        return row

    def _append(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(text.encode())

    def of_arm(self, arm: str) -> dict[str, Row]:
        """All rows of an arm, by key."""
        return {key: row for (key, other), row in self._rows.items() if other == arm}

    def pairs(self, arm: str, other: str) -> list[tuple[Row, Row]]:
        """The rows of two arms, for keys that have both."""
        others = self.of_arm(other)
        return [(row, others[key]) for key, row in self.of_arm(arm).items() if key in others]


def key_of(pair: ModelPair, *parts: object) -> str:
    """Identifies a prompt's rows: the pair's weights, device and precisions, and what else decides them."""
    models = [_digest_of(model) for model in (pair.target, pair.draft)]
    return digest([*parts, pair.precision, pair.draft_precision, str(pair.target.device), *models])


def digest(value: object) -> str:
    """Twenty digits that identify a value."""
    return sha256(json.dumps(value, default=str).encode()).hexdigest()[:20]


def _digest_of(model: PreTrainedModel) -> str:
    """Identifies a model's weights: its configuration, and a number of each parameter."""
    numbers = [float(parameter.detach().flatten()[-1]) for parameter in model.parameters()]
    return digest([fingerprint(text_config(model.config)), numbers])
