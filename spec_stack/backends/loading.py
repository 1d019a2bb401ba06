"""Loading a draft/target pair, and saying before any long work whether it fits together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from spec_stack.backends.architectures import check_architecture, text_config
from spec_stack.backends.prepack import can_prepack, prepack
from spec_stack.backends.vocabulary import compare

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class LoadedPair:
    """Two models on one device, their tokenizers, and the precision's name."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: Any
    draft_tokenizer: Any
    precision: str


def resolve_device(device: str | None) -> torch.device:
    """The device asked for; None takes CUDA where there is one. Raises ValueError for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:N'") from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    if resolved.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ValueError(f"device {device!r} cannot run a model; use 'cpu', 'cuda' or 'cuda:N'")
    return resolved


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision asked for; "auto" is fp32 on a CPU and bf16 elsewhere."""
    if precision == "auto":
        return "fp32" if device.type == "cpu" else "bf16"
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; use one of {['auto', *PRECISIONS]}")
    return precision


def resolve_pair(target: str | Path | None, draft: str | Path | None) -> tuple[str, str]:
    """Folders or hub ids of both models; the embedded pair where neither is named.

    Raises ValueError for a folder that is not there, or when only one of the two is named.
    """
    if target is None and draft is None:
        return str(ASSETS / "target"), str(ASSETS / "draft")
    if target is None or draft is None:
        missing = "target" if target is None else "draft"
        raise ValueError(f"no {missing} given; name both target= and draft=, or neither for the embedded pair")
    return _resolve_source("target", target), _resolve_source("draft", draft)


def _resolve_source(role: str, source: str | Path) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{role} folder {path} holds no config.json; is it a transformers model?")
        return str(path)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.startswith("."):
        return source
    raise ValueError(f"{role} {str(source)!r} is neither a folder nor a hub id of the form owner/name")


def load_config(source: str) -> Any:
    """A model's configuration. Raises ValueError with the reason where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot read the model configuration of {source!r}: {error}") from error


def load_tokenizer(source: str) -> Any:
    """A model's tokenizer. Raises ValueError with the reason where there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the tokenizer of {source!r}: {error}") from error


def check_pair(target: Any, draft: Any) -> None:
    """Raise ValueError where two configurations cannot work together."""
    check_architecture("target", target)
    check_architecture("draft", draft)


def max_positions(config: Any) -> int:
    """Positions a model was made for."""
    return int(text_config(config).max_position_embeddings)


def end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end a text, from the generation config or else the model config."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = text_config(model.config).eos_token_id if ids is None else ids
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    precision: str = "auto",
    device: str | None = None,
    prepack_linears: bool | None = None,
) -> LoadedPair:
    """Load both models and tokenizers; everything that can be refused is refused before the weights are read.

    prepack_linears lays the weights of linear layers out for oneDNN (`backends.prepack`); None does so wherever it
    works. Raises ValueError for what a caller can change.
    """
    on = resolve_device(device)
    name = resolve_precision(precision, on)
    packs = prepack_linears is not False and can_prepack(on, PRECISIONS[name])
    if prepack_linears and not packs:
        raise ValueError(f"linear layers cannot be prepacked on {on} in {name}; leave prepack_linears out")
    target_source, draft_source = resolve_pair(target, draft)
    configs = load_config(target_source), load_config(draft_source)
    check_pair(*configs)
    tokenizers = load_tokenizer(target_source), load_tokenizer(draft_source)
    compare(*tokenizers, *(text_config(config).vocab_size for config in configs))
    models = [_load_model(source, name, on) for source in (target_source, draft_source)]
    if packs:
        for model in models:
            prepack(model)
    return LoadedPair(
        target=models[0],
        draft=models[1],
        tokenizer=tokenizers[0],
        draft_tokenizer=tokenizers[1],
        precision=name,
    )


def _load_model(source: str, precision: str, device: torch.device) -> PreTrainedModel:
    # A bar for a model that loads in milliseconds is noise; a large one keeps it.
    quiet = Path(source).is_relative_to(ASSETS)
    shown = transformers_logging.is_progress_bar_enabled()
    if quiet:
        transformers_logging.disable_progress_bar()
    try:
        # Without attn_implementation: SDPA, or eager attention for those that have none (GPT-OSS).
        model = AutoModelForCausalLM.from_pretrained(source, dtype=PRECISIONS[precision])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot load the weights of {source!r}: {error}") from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    try:
        model.to(device).eval()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"cannot put the model on device {str(device)!r}: {error}") from error
    return model


def precision_of(model: PreTrainedModel) -> str:
    """The precision's name of a loaded model."""
    return {dtype: name for name, dtype in PRECISIONS.items()}.get(model.dtype, str(model.dtype).removeprefix("torch."))
