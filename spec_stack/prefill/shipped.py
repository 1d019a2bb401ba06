"""Where a draft's calibration is found: beside it, in the hub's cache, or among those that ship with the package.

`sketch` identifies the weights of a loaded draft, `sketch_of_files` those of files (docs/calibration.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spec_stack.prefill.calibration import FILE_NAME, Calibration, fingerprint

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "calibrations"
# Values of the embedding: so many rows, spread over the vocabulary, and so many columns of each.
_ROWS, _COLUMNS = 16, 16
AUTO = "auto"
"""In place of a calibration's file: the one that is found, else one that is made while the pair loads."""
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "model.language_model.embed_tokens.weight")
# Rounding to 4 bits moves the values by less, training for another purpose by more.
_TOLERANCE = 0.12


def sketch(embedding: torch.Tensor) -> tuple[float, ...]:
    """A few values of a token embedding (vocab_size, hidden_size), to identify weights: three digits; empty on meta."""
    if embedding.is_meta:
        return ()
    rows = torch.tensor(_rows(embedding.shape[0]), device=embedding.device)
    return _three_digits(embedding.detach()[rows, :_COLUMNS])


def sketch_of_files(source: str | Path) -> tuple[float, ...]:
    """`sketch` from the model.safetensors of a folder or a cached hub id; empty where there is none, and of models in
    several files, larger than the drafts that are calibrated. Reads a few rows.
    """
    file = _weights_of(source)
    if file is None:
        return ()
    try:
        with safe_open(file, "pt") as tensors:
            names = [name for name in _EMBEDDINGS if name in tensors.keys()]  # noqa: SIM118
            if not names:
                return ()
            rows = tensors.get_slice(names[0])
            picked = [rows[row : row + 1, :_COLUMNS] for row in _rows(rows.get_shape()[0])]
    except (OSError, SafetensorError):
        return ()
    return _three_digits(torch.cat(picked))


def is_same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two sketches are of the same weights, up to rounding."""
    if not one or len(one) != len(other):
        return False
    apart = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return apart <= _TOLERANCE**2 * max(sum(a * a for a in one), math.ulp(0.0))


def choose_calibration(
    draft: str | Path,
    named: str | Path | bool | None,
    configs: tuple[Any, Any],
    weights: Callable[[], Sequence[float]],
) -> tuple[Calibration | None, str]:
    """The calibration of a pair: the named one, else the saved one (`file_of`), else the shipped one.

    named: a file or folder; None, True and "auto" name none, False disables all. configs: the transformers text
    configurations of target and draft. weights: gives the draft's sketch. Returns it or None, and why the saved one
    does not apply (empty if it does). Raises ValueError for a named one that does not fit these models, and for a
    damaged file.
    """
    if named is False:
        return None, ""
    if named is not None and named is not True and named != AUTO:
        found = Calibration.load(named)
        if problem := found.check(*configs):
            raise ValueError(f"{named}: {problem}; calibrate this pair, or name no calibration")
        return found, ""
    problem = ""
    if str(draft) and (file := file_of(draft)).is_file():
        found = Calibration.load(file)
        if not (problem := found.check(*configs) or _other_weights(found, weights())):
            return found, ""
    return find_shipped(configs[1], weights()), problem


def _other_weights(found: Calibration, own: Sequence[float]) -> str:
    """Why a calibration does not fit these weights; empty where it does, and where a sketch is missing."""
    is_known = bool(found.weights) and bool(own)
    return "it was made for other weights" if is_known and not is_same(found.weights, own) else ""


def file_of(draft: str | Path) -> Path:
    """Where a draft's calibration is saved: in its folder, or for a hub id and a GGUF file in the hub's cache."""
    if Path(draft).is_dir():
        return Path(draft) / FILE_NAME
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "spec_stack" / f"{str(draft).strip('/').replace('/', '--')}.json"


def find_shipped(config: Any, weights: Sequence[float]) -> Calibration | None:
    """The shipped calibration of a draft, by its text configuration and sketch; None for an unknown one."""
    own = fingerprint(config)
    return next((each for each in shipped() if dict(each.draft) == own and is_same(each.weights, weights)), None)


@lru_cache(maxsize=1)
def shipped() -> tuple[Calibration, ...]:
    files = sorted(FOLDER.glob("*.json"))
    return tuple(replace(Calibration.load(file), origin=f"what ships for {file.stem}") for file in files)


def _three_digits(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.3g}") for value in values.float().flatten().tolist())


def _rows(num_rows: int) -> list[int]:
    return [(2 * at + 1) * num_rows // (2 * _ROWS) for at in range(_ROWS)]


def _weights_of(source: str | Path) -> Path | None:
    """The weights in a folder, or of a cached hub id."""
    name = "model.safetensors"
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(str(source), name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
