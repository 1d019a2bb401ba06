"""GGUF files: named like folders, checked before they are read, and unpacked into plain weights by transformers.

A file is named by its path, or on the hub as owner/name/file.gguf. Its weights are dequantized to the dtype of a
precision when they are loaded; nothing runs on the packed blocks.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.config import how_to_install

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUFFIX = ".gguf"
_PACKAGES = ("gguf", "accelerate")
_HUB_FILE = re.compile(r"[\w.-]+/[\w.-]+/[\w./-]+\.gguf", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def is_gguf(source: str | Path) -> bool:
    """Return whether a source names a GGUF file, here or on the hub."""
    return str(source).lower().endswith(_SUFFIX)


def name_file(source: str | Path | None, gguf_file: str | None) -> str | Path | None:
    """A source whose GGUF file is given apart, as transformers has it, in one name.

    Raises
    ------
    ValueError
        For a file without a source, or that is no GGUF file.
    """
    if gguf_file is None:
        return source
    if source is None or not isinstance(gguf_file, str) or not is_gguf(gguf_file):
        raise ValueError(f"gguf_file names a .gguf file in the folder or hub id beside it, got {gguf_file!r}")
    return f"{source}/{gguf_file}"


def check_gguf(role: str, source: str) -> str:
    """The name of a GGUF file that can be looked for.

    Raises
    ------
    ValueError
        Where it is not there, is one part of several, or a package to read it is missing.
    """
    path = Path(source).expanduser()
    if not path.is_file() and not (_HUB_FILE.fullmatch(source) and not source.startswith(".")):
        raise ValueError(f"{role} {source!r} is neither a file nor of the form owner/name/file.gguf")
    if _PART.search(source):
        raise ValueError(f"{role} {source!r} is one part of several; join them first: llama-gguf-split --merge")
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise ValueError(
            f"{role} {source!r} needs {' and '.join(missing)}, not installed here: {how_to_install('gguf')}"
        )
    return str(path) if path.is_file() else source


def locate(source: str, hub: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a source: its folder, with the file's name as an option where it is a GGUF file.

    Parameters
    ----------
    source : str
        Of any kind.
    hub : mapping, optional
        `HubConfig.options`; a file on the hub is fetched by them.

    Returns
    -------
    (str, dict)
        What `from_pretrained` takes: a name, and options with those of `hub`.
    """
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
    """The configuration that a GGUF file holds, without a trace of how its weights are packed.

    Raises
    ------
    ValueError
        For a file that is none, and for tensor types and architectures that transformers cannot read.
    """
    from transformers import AutoConfig
    from transformers.integrations.gguf.reader import GgufHeader

    # It goes through all tensors and refuses types that are unknown to it.
    try:
        header = GgufHeader.from_file(str(Path(folder) / options["gguf_file"]))
    except (struct.error, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"the file is cut off or damaged in its header: {error}") from error
    config = AutoConfig.from_pretrained(folder, **options)
    if config.dtype is None:
        # Blocks of 8 bits and less hold no more than bf16 does.
        config.dtype = header.dtype or torch.bfloat16
    return config


def unpacking() -> dict[str, Any]:
    """Return what `from_pretrained` is told beside the file: unpack all weights."""
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """A model that was loaded from a GGUF file, in place, as what it is by now: one of plain weights."""
    for holder in (model.config, model):
        for name in ("quantization_config", "hf_quantizer", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    model.is_quantized = False
    return model
