"""Model sources: a folder, a hub id, a GGUF file (path or owner/name/file.gguf), or a LoRA adapter's folder."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.config import how_to_install
from spec_stack.hf.versions import gguf_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER, _MODEL = "adapter_config.json", "config.json"
# Tokenizer files, one of which a folder needs.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(r"[\w-][\w.-]*/[\w.-]+/[\w./-]+\.gguf", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_MERGE = "model.merge_and_unload().save_pretrained(...)"


def is_gguf(source: str | Path) -> bool:
    """Whether a source names a GGUF file, local or on the hub."""
    return str(source).lower().endswith(".gguf")


def is_adapter(source: str | Path) -> bool:
    """Whether this is a folder with an adapter and no model."""
    return (Path(source) / _ADAPTER).is_file() and not (Path(source) / _MODEL).is_file()


def has_tokenizer(source: str) -> bool:
    """Whether this folder contains a tokenizer."""
    return any((Path(source) / name).is_file() for name in _TOKENIZER_FILES)


def missing_packages(names: Sequence[str]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def resolve_source(role: str, source: str | Path) -> str:
    """A model's loadable name. Raises ValueError with a fix if it cannot be loaded."""
    path = Path(source).expanduser()
    if is_gguf(source):
        return _resolve_gguf(role, str(source), path)
    if path.is_dir():
        _check_folder(role, path)
        return str(path)
    if path.is_file():
        raise ValueError(f"{role} {path} is a file; name the folder that it is in")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return source
    raise ValueError(f"{role} {str(source)!r} is neither a folder nor a hub id of the form owner/name")


def _resolve_gguf(role: str, source: str, path: Path) -> str:
    if not path.is_file() and not _HUB_FILE.fullmatch(source):
        raise ValueError(f"{role} {source!r} is neither a file nor of the form owner/name/file.gguf")
    if _PART.search(source):
        raise ValueError(f"{role} {source!r} is one part of several; join them first: llama-gguf-split --merge")
    if missing := missing_packages(("gguf", "accelerate")):
        raise ValueError(
            f"{role} {source!r} needs {' and '.join(missing)}, not installed here: {how_to_install('gguf')}"
        )
    return str(path) if path.is_file() else source


def _check_folder(role: str, folder: Path) -> None:
    if (folder / _MODEL).is_file():
        return
    if is_adapter(folder):
        if missing_packages(["peft"]):
            raise ValueError(
                f"{role} folder {folder} holds an adapter; pip install peft, and it is merged when the pair loads, or "
                f"merge it yourself: {_MERGE}"
            )
        return
    if files := sorted(folder.glob("*.gguf")):
        raise ValueError(f"{role} folder {folder} holds GGUF files; name the one that is meant, {files[0]}")
    raise ValueError(f"{role} folder {folder} holds no config.json; is it a transformers model?")


def base_of(source: str) -> str:
    """An adapter's base model, or the source itself. Raises ValueError if the base is missing."""
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
            f"{_ADAPTER}, or merge it by hand: {_MERGE}"
        )
    return base


def locate(source: str, hub: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and options for `from_pretrained`. hub: `HubConfig.options`; a GGUF file on the hub is downloaded."""
    options = dict(hub or {})
    if not is_gguf(source):
        return source, options
    path = Path(source)
    if not path.is_file():
        from transformers.utils.hub import cached_file

        owner, name, file = source.split("/", 2)
        path = Path(cached_file(f"{owner}/{name}", file, revision=options.get("revision"), token=options.get("token")))
    return str(path.parent), options | {"gguf_file": path.name}


def load_gguf_config(folder: str, options: Mapping[str, Any]) -> Any:
    """A GGUF file's config. Raises ValueError for a file that transformers cannot read."""
    from transformers import AutoConfig

    reader = gguf_header()
    # It visits all tensors and rejects unknown types.
    try:
        header = None if reader is None else reader.from_file(str(Path(folder) / options["gguf_file"]))
        config = AutoConfig.from_pretrained(folder, **options)
    except (struct.error, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"the file is cut off or damaged in its header: {error}") from error
    if config.dtype is None:
        # bf16 holds quantized blocks of at most 8 bits exactly.
        config.dtype = getattr(header, "dtype", None) or torch.bfloat16
    return config


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a GGUF-loaded model in place to plain weights, without quantization attributes."""
    for holder in (model.config, model):
        for name in ("quantization_config", "hf_quantizer", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    model.is_quantized = False
    return model


def merge(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The model with the adapter merged. Raises ValueError if it does not fit."""
    from peft import PeftModel

    try:
        merged: PreTrainedModel = PeftModel.from_pretrained(model, source).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"cannot merge the adapter {source} into its base: {error}") from error
    return merged
