"""Calibrations that ship with the package, for known drafts: matched by configuration and weights.

How it is used: `choose_calibration` settles which calibration holds for a pair: the one that is named, the one
beside the draft, or the one that ships. Weights are told by `sketch(embedding)` for a draft that is loaded, by
`sketch_of_files(draft)` for one that is not. `docs/calibration.md` says how to add one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spec_stack.prefill.calibration import Calibration, find_calibration, fingerprint

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "calibrations"
# Values of the embedding: so many rows, spread over the vocabulary, and so many columns of each.
_ROWS, _COLUMNS = 16, 16
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "model.language_model.embed_tokens.weight")
# Rounding to 4 bits moves the values by less, training for another purpose by more.
_TOLERANCE = 0.12


def sketch(embedding: torch.Tensor) -> tuple[float, ...]:
    """A few values of a draft's token embedding, spread over the vocabulary, which tell its weights from others.

    Parameters
    ----------
    embedding : torch.Tensor
        (vocab_size, hidden_size), of any floating dtype.

    Returns
    -------
    tuple of float
        Rounded to three digits; empty for weights that are not there (on the meta device).
    """
    if embedding.is_meta:
        return ()
    rows = torch.tensor(_rows(embedding.shape[0]), device=embedding.device)
    values = embedding.detach()[rows, :_COLUMNS].float().flatten().tolist()
    return tuple(float(f"{value:.3g}") for value in values)


def sketch_of_files(source: str | Path) -> tuple[float, ...]:
    """The same from the safetensors files of a folder, or of a hub id whose files are in the cache already; empty where
    there are none. Reads a few rows."""
    file = _file_with_embedding(source)
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
    values = torch.cat(picked).float().flatten().tolist()
    return tuple(float(f"{value:.3g}") for value in values)


def is_same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two sketches are of the same weights, but for their rounding."""
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
    """The calibration that holds for a pair: the one that is named, else the one beside the draft, else what ships.

    Parameters
    ----------
    draft
        The draft's folder or hub id.
    named
        A file or folder; None and True name none, False takes none at all.
    configs
        The transformers text configurations of target and draft.
    weights
        Gives the draft's sketch, where it comes to that.

    Returns
    -------
    tuple
        The calibration or None; and why the one beside the draft is left aside, empty where it is not.

    Raises
    ------
    ValueError
        For one that is named and does not hold for these models, and for a file that is no calibration.
    """
    if named is False:
        return None, ""
    found = find_calibration(draft, named)
    problem = "" if found is None else found.check(*configs)
    if problem and not (named is None or named is True):
        raise ValueError(f"{named}: {problem}; calibrate this pair, or name no calibration")
    if found is None or problem:
        found = find_shipped(configs[1], weights())
    return found, problem


def find_shipped(config: Any, weights: Sequence[float]) -> Calibration | None:
    """The calibration that ships for a draft; None for a draft that is not known.

    Parameters
    ----------
    config
        The draft's transformers text configuration.
    weights
        Its sketch; an empty one matches nothing.
    """
    own = fingerprint(config)
    return next((each for each in shipped() if dict(each.draft) == own and is_same(each.weights, weights)), None)


@lru_cache(maxsize=1)
def shipped() -> tuple[Calibration, ...]:
    """All calibrations that ship."""
    files = sorted(FOLDER.glob("*.json"))
    return tuple(replace(Calibration.load(file), origin=f"what ships for {file.stem}") for file in files)


def _rows(num_rows: int) -> list[int]:
    return [(2 * at + 1) * num_rows // (2 * _ROWS) for at in range(_ROWS)]


def _file_with_embedding(source: str | Path) -> Path | None:
    index = _file_of(source, "model.safetensors.index.json")
    if index is None:
        return _file_of(source, "model.safetensors")
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError):
        return None
    found = next((names[name] for name in _EMBEDDINGS if name in names), None)
    return None if found is None else _file_of(source, found)


def _file_of(source: str | Path, name: str) -> Path | None:
    """A file of a folder, or of a hub id as far as it lies in the cache."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(str(source), name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
