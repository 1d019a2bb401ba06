"""Loading a draft/target pair, checked before any weights are read: from folders, hub ids, GGUF files (a path or
owner/name/file.gguf) and LoRA adapters' folders."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from spec_stack.config import PRECISIONS, HubConfig, LoadConfig, Positions, how_to_install
from spec_stack.controller.predictor import FILE_NAME as PREDICTOR_NAME
from spec_stack.hf.architectures import check_architecture, end_token_ids
from spec_stack.hf.precision import (
    DTYPES,
    QUANTIZED,
    Precision,
    missing_packages,
    precision_of,
    resolve_precisions,
    stored_precision,
)
from spec_stack.hf.prepack import can_prepack, prepack
from spec_stack.hf.versions import gguf_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSETS = Path(__file__).resolve().parent.parent / "assets"
_ROLES = ("target", "draft")
DeviceMap = str | Mapping[str, Any]
_ADAPTER, _MODEL = "adapter_config.json", "config.json"
# Tokenizer files, one of which a folder needs.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(r"[\w-][\w.-]*/[\w.-]+/[\w./-]+\.gguf", re.IGNORECASE)
_UNREADABLE = (OSError, ImportError, ValueError, LookupError)


@dataclass(frozen=True)
class FoundModel:
    """A loadable model, before its weights are read. hub: `HubConfig.options`. packs: whether it is prepacked."""

    source: str
    config: Any
    precision: Precision
    device: torch.device
    hub: Mapping[str, Any] = field(default_factory=dict)
    device_map: DeviceMap | None = None
    packs: bool = False

    def load(self) -> PreTrainedModel:
        """Load the weights. Raises ValueError for weights that cannot be read or do not fit on the device."""
        model, options = self._read()
        end_token_ids(model)
        if _is_gguf(self.source):
            model = _as_plain(model)
        if _is_adapter(self.source):
            model = _merge(model, self.source)
        model.eval()
        if "device_map" not in options:
            try:
                model = model.to(self.device)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                raise ValueError(f"cannot put the model on device {str(self.device)!r}: {error}") from error
        if self.packs:
            prepack(model)
        return model

    def _read(self) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model as transformers loads it, and the options of that."""
        from transformers import AutoModelForCausalLM

        try:
            folder, located = _locate(_base_of(self.source), self.hub)
            options = self.precision.load_options(self.device) | located
            if _is_gguf(self.source):
                options |= gguf_options(self.config)
            if self.device_map is not None:
                options["device_map"] = self.device_map
            # Without attn_implementation: SDPA, or eager attention for models without it (GPT-OSS).
            with _quiet_bars(self.source):
                model, loaded = AutoModelForCausalLM.from_pretrained(folder, **options, output_loading_info=True)
        except (OSError, ImportError, SafetensorError, RuntimeError) as error:
            raise ValueError(f"cannot load the weights of {self.source!r}: {error}") from error
        missing = sorted(loaded["missing_keys"])
        # transformers would initialize them randomly.
        if missing and self.precision.name not in QUANTIZED and stored_precision(model.config) is None:
            raise ValueError(
                f"{self.source!r} lacks {len(missing)} weights of its configuration: {', '.join(missing[:3])}"
            )
        return model, options


def resolve_device(device: str | None) -> torch.device:
    """The requested device; None is CUDA if present. Raises ValueError for a missing device."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {error}; use 'cpu', 'cuda' or 'cuda:N'") from error
    resolved = torch.device(device)
    if resolved.type == "meta":
        raise ValueError(f"device {device!r} cannot run a model; use 'cpu', 'cuda' or 'cuda:N'")
    return resolved


def resolve_pair(target: str | Path | None, draft: str | Path | None) -> tuple[str, str]:
    """Loadable names of both models; the embedded pair if neither is given. Raises ValueError for only one of them."""
    if target is None and draft is None:
        return str(ASSETS / "target"), str(ASSETS / "draft")
    if target is None or draft is None:
        missing = "target" if target is None else "draft"
        raise ValueError(f"no {missing} given; name both target= and draft=, or neither for the embedded pair")
    return resolve_source("target", target), resolve_source("draft", draft)


def _is_gguf(source: str | Path) -> bool:
    """Whether a source names a GGUF file, local or on the hub."""
    return str(source).lower().endswith(".gguf")


def _is_adapter(source: str | Path) -> bool:
    """Whether this is a folder with an adapter and no model."""
    return (Path(source) / _ADAPTER).is_file() and not (Path(source) / _MODEL).is_file()


def has_tokenizer(source: str) -> bool:
    """Whether this folder contains a tokenizer."""
    return any((Path(source) / name).is_file() for name in _TOKENIZER_FILES)


def resolve_source(role: str, source: str | Path) -> str:
    """A model's loadable name: a folder, a GGUF file, or a place on the hub. Raises ValueError for anything else."""
    path, is_gguf = Path(source).expanduser(), _is_gguf(source)
    if is_gguf and (missing := missing_packages(("gguf", "accelerate"))):
        raise ValueError(f"{role} {str(source)!r} needs {' and '.join(missing)}: {how_to_install('gguf')}")
    if path.is_dir() or (is_gguf and path.is_file()):
        return str(path)
    if path.is_file():
        raise ValueError(f"{role} {path} is a file; name the folder that it is in")
    if (_HUB_FILE if is_gguf else _HUB_ID).fullmatch(str(source)):
        return str(source)
    form = "a file nor of the form owner/name/file.gguf" if is_gguf else "a folder nor a hub id of the form owner/name"
    raise ValueError(f"{role} {str(source)!r} is neither {form}")


def _base_of(source: str) -> str:
    """An adapter's base model, or the source itself."""
    if not _is_adapter(source):
        return source
    from peft import PeftConfig

    return str(PeftConfig.from_pretrained(source).base_model_name_or_path)


def _locate(source: str, hub: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and options for `from_pretrained`. hub: `HubConfig.options`; a GGUF file on the hub is downloaded."""
    options = dict(hub or {})
    if not _is_gguf(source):
        return source, options
    path = Path(source)
    if not path.is_file():
        from transformers.utils.hub import cached_file

        owner, name, file = source.split("/", 2)
        path = Path(cached_file(f"{owner}/{name}", file, revision=options.get("revision"), token=options.get("token")))
    return str(path.parent), options | {"gguf_file": path.name}


def _as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a GGUF-loaded model in place to plain weights, without quantization attributes."""
    for holder in (model.config, model):
        for name in ("quantization_config", "hf_quantizer", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    model.is_quantized = False
    return model


def _merge(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """The model with the adapter merged. Raises ValueError if it does not fit."""
    from peft import PeftModel

    try:
        merged: PreTrainedModel = PeftModel.from_pretrained(model, source).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"cannot merge the adapter {source} into its base: {error}") from error
    return merged


def find_predictors(draft: str | Path) -> dict[str, Path]:
    """Trained predictors in a draft's folder by policy name; none for a hub id."""
    file = Path(draft) / PREDICTOR_NAME
    return {"speckv": file} if file.is_file() else {}


def load_config(source: str, hub: Mapping[str, Any] | None = None) -> Any:
    """A model's config; hub: `HubConfig.options`. Raises ValueError with the reason."""
    from transformers import AutoConfig

    try:
        folder, options = _locate(_base_of(source), hub)
        config = AutoConfig.from_pretrained(folder, **options)
    except (*_UNREADABLE, struct.error, OverflowError, MemoryError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"cannot read the model configuration of {source!r}: {error}") from error
    if _is_gguf(source) and config.dtype is None:
        # bf16 holds quantized blocks of at most 8 bits exactly.
        config.dtype = torch.bfloat16
    return config


def load_tokenizer(source: str, hub: Mapping[str, Any] | None = None) -> Any:
    """A model's tokenizer; hub: from `HubConfig.options`. Raises ValueError with the reason."""
    from transformers import AutoTokenizer

    try:
        folder, options = _locate(source if has_tokenizer(source) else _base_of(source), hub)
        if has_tokenizer(folder):
            # A tokenizer file beside a GGUF file loads at once; the GGUF's own takes seconds.
            options.pop("gguf_file", None)
        return AutoTokenizer.from_pretrained(folder, **options)
    except _UNREADABLE as error:
        raise ValueError(f"cannot load the tokenizer of {source!r}: {error}") from error


def name_of_model(model: PreTrainedModel) -> str:
    """The folder or hub id that a model was loaded from; empty for one that was made."""
    return str(getattr(model, "name_or_path", "") or "")


def find_tokenizers(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None, draft_tokenizer: Any = None
) -> tuple[Any, Any]:
    """The tokenizers of loaded models: the given ones, or those where the models were loaded from; None without one."""
    source, own = name_of_model(target), name_of_model(draft)
    if tokenizer is not None:
        is_known = draft_tokenizer is not None or not own or not has_tokenizer(own)
        return tokenizer, draft_tokenizer if is_known else load_tokenizer(own)
    if not source or not (has_tokenizer(source) or _HUB_ID.fullmatch(source)):
        return None, draft_tokenizer
    try:
        tokenizer, found = load_tokenizers(source, own or source)
    except ValueError:
        return None, draft_tokenizer
    return tokenizer, draft_tokenizer or (found if own else None)


def load_tokenizers(target: str, draft: str, hub: HubConfig | None = None) -> tuple[Any, Any]:
    """Both tokenizers; a draft folder without one, as in the embedded pair, uses the target's."""
    of_target, of_draft = (None if hub is None else hub.options(role) for role in _ROLES)
    tokenizer = load_tokenizer(target, of_target)
    return tokenizer, load_draft_tokenizer(draft, tokenizer, of_draft)


def load_draft_tokenizer(draft: str, tokenizer: Any, hub: Mapping[str, Any] | None = None) -> Any:
    """A draft's tokenizer; the target's for a folder without one."""
    shares = Path(draft).is_dir() and not _is_adapter(draft) and not has_tokenizer(draft)
    return tokenizer if shares else load_tokenizer(draft, hub)


def load_draft(source: str | Path, target: PreTrainedModel, positions: Positions) -> PreTrainedModel:
    """A draft for a loaded target, on its device and in its precision."""
    path = resolve_source("draft", source)
    config = load_config(path)
    check_pair(target.config, config, positions)
    name = precision_of(target)
    load = LoadConfig(name if name in PRECISIONS else "auto", name if name in DTYPES else "auto")
    _, precision = resolve_precisions(target.config, config, load, target.device)
    return FoundModel(path, config, precision, target.device).load()


def open_alone(source: str | Path, precision: str, device: str | None) -> FoundModel:
    """A draft without a target. Raises ValueError as `open_pair`."""
    path, on = resolve_source("draft", source), resolve_device(device)
    config = load_config(path)
    check_architecture("draft", config, scores_only=True)
    _, resolved = resolve_precisions(config, config, LoadConfig(draft_precision=precision), on)
    return FoundModel(path, config, resolved, on)


def check_pair(target: Any, draft: Any, positions: Positions = "original") -> None:
    """Raise ValueError for incompatible configs; positions: the target's, original or contiguous."""
    check_architecture("target", target, positions)
    check_architecture("draft", draft)


def open_pair(
    target: str | Path | None,
    draft: str | Path | None,
    load: LoadConfig,
    device: str | None,
    prepack_linears: bool,
    hub: HubConfig | None,
    device_map: DeviceMap | None,
    positions: Positions,
) -> tuple[FoundModel, FoundModel]:
    """Find target and draft, and decide how to load them. Raises ValueError for every user error."""
    hub = hub or HubConfig()
    if device_map is not None and device is not None:
        raise ValueError("give device or device_map, not both")
    on = resolve_device(device)
    sources = resolve_pair(target, draft)
    configs = load_config(sources[0], hub.options("target")), load_config(sources[1], hub.options("draft"))
    check_pair(*configs, positions)
    precisions = resolve_precisions(*configs, load, on)
    found = []
    for role, source, config, precision in zip(_ROLES, sources, configs, precisions, strict=True):
        if _is_gguf(source) and precision.name in QUANTIZED:
            raise ValueError(f"the {role} is a GGUF file, which loads in bf16 or fp32, not in {precision.name}")
        # A mapping uses the target's module names.
        own_map = device_map if role == "target" or isinstance(device_map, str) else None
        # A layer that accelerate may move, or that is compiled, stays as it is.
        stays_plain = device_map is not None or (role == "draft" and load.draft_step == "compiled")
        packs = prepack_linears and not stays_plain and can_prepack(on, precision.dtype)
        found.append(FoundModel(source, config, precision, on, hub.options(role), own_map, packs))
    return found[0], found[1]


@contextmanager
def _quiet_bars(source: str) -> Iterator[None]:
    """Hide the progress bar of the embedded models, which load in milliseconds."""
    from transformers.utils import logging as transformers_logging

    is_hidden = Path(source).is_relative_to(ASSETS) and transformers_logging.is_progress_bar_enabled()
    if is_hidden:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_hidden:
            transformers_logging.enable_progress_bar()
