"""Folders that hold no model of their own: a LoRA adapter is merged into its base, and others are refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "adapter_config.json"
_MODEL = "config.json"


def is_adapter(source: str | Path) -> bool:
    """Return whether this is a folder with an adapter and no model beside it."""
    folder = Path(source)
    return (folder / _ADAPTER).is_file() and not (folder / _MODEL).is_file()


def base_of(source: str) -> str:
    """The model that a source stands for: an adapter's base, else the source itself.

    Raises
    ------
    ValueError
        For an adapter that names no base.
    """
    if not is_adapter(source):
        return source
    try:
        base = json.loads((Path(source) / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read the base model of the adapter {source}: {error!r}") from error
    if not isinstance(base, str) or not base:
        raise ValueError(f"the adapter {source} names no base_model_name_or_path; merge it by hand")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(
            f"the base {base} that the adapter {source} names is not here; correct base_model_name_or_path in its "
            f"{_ADAPTER}, or merge it by hand: model.merge_and_unload().save_pretrained(...)"
        )
    return base


def check_file(role: str, path: Path) -> None:
    """Raise ValueError, with the way to go, for a file where a folder belongs."""
    if path.is_file():
        raise ValueError(f"{role} {path} is a file; name the folder that it is in")


def check_folder(role: str, folder: Path) -> None:
    """Raise ValueError, with the way to go, for a folder that no model can be loaded from."""
    if (folder / _MODEL).is_file():
        return
    if is_adapter(folder):
        if find_spec("peft") is None:
            raise ValueError(
                f"{role} folder {folder} holds an adapter; pip install peft, and it is merged when the pair loads, or "
                "merge it yourself: model.merge_and_unload().save_pretrained(...)"
            )
        return
    files = sorted(folder.glob("*.gguf"))
    if files:
        raise ValueError(f"{role} folder {folder} holds GGUF files; name the one that is meant, {files[0]}")
    raise ValueError(f"{role} folder {folder} holds no config.json; is it a transformers model?")


def merge(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The model with the adapter's weights added to its own.

    Raises
    ------
    ValueError
        For an adapter that does not fit the model, or cannot be read.
    """
    from peft import PeftModel

    try:
        merged: PreTrainedModel = PeftModel.from_pretrained(model, source).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"cannot merge the adapter {source} into its base: {error}") from error
    return merged
