"""Loading a draft/target pair, and saying before any long work whether it fits together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from spec_stack.config import LoadConfig
from spec_stack.hf.architectures import check_architecture, text_config
from spec_stack.hf.precision import Precision, resolve_precisions
from spec_stack.hf.prepack import can_prepack, prepack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSETS = Path(__file__).resolve().parent.parent / "assets"
CONTROLLERS = ASSETS / "controllers"
# Policies that use a trained predictor where one is shipped for the pair. `throughput` is not among them: none has
# beaten what it learns online (experiments/LOG.md).
_PREDICTORS = {"speckv": "step.json"}
# A folder with a tokenizer has one of these.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class FoundPair:
    """A pair that can be loaded: all that is known of it before the weights are read.

    Parameters
    ----------
    sources : (str, str)
        Folders or hub ids of target and draft.
    configs, tokenizers : (object, object)
        Target's and draft's.
    precisions : (Precision, Precision)
        What each is loaded in.
    packs : (bool, bool)
        Whether the linear layers of each are laid out for oneDNN.
    device : torch.device
        Where both go.
    predictors : mapping of str to Path
        Files of trained predictors that come with the pair, by the policy that uses them.
    """

    sources: tuple[str, str]
    configs: tuple[Any, Any]
    tokenizers: tuple[Any, Any]
    precisions: tuple[Precision, Precision]
    packs: tuple[bool, bool]
    device: torch.device
    predictors: Mapping[str, Path]

    def load_models(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Read the weights. Raises ValueError where they cannot be read or do not fit on the device."""
        target, draft = (
            _load_model(source, precision, self.device)
            for source, precision in zip(self.sources, self.precisions, strict=True)
        )
        for model, is_packed in zip((target, draft), self.packs, strict=True):
            if is_packed:
                prepack(model)
        return target, draft


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


def shipped_predictors(target: str | Path | None) -> dict[str, Path]:
    """Files of the predictors that come with a pair, by policy: with the embedded one only."""
    files = {policy: CONTROLLERS / name for policy, name in _PREDICTORS.items()}
    return {policy: file for policy, file in files.items() if target is None and file.is_file()}


def load_config(source: str) -> Any:
    """A model's configuration. Raises ValueError with the reason where it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot read the model configuration of {source!r}: {error}") from error


def load_tokenizer(source: str) -> Any:
    """A model's tokenizer. Raises ValueError with the reason where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the tokenizer of {source!r}: {error}") from error


def load_tokenizers(target: str, draft: str) -> tuple[Any, Any]:
    """Both tokenizers. A draft folder without one is taken to have the target's; the pair embedded in the package is
    stored so. Raises ValueError as `load_tokenizer` does."""
    tokenizer = load_tokenizer(target)
    shares = Path(draft).is_dir() and not any((Path(draft) / name).is_file() for name in _TOKENIZER_FILES)
    return tokenizer, tokenizer if shares else load_tokenizer(draft)


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


def open_pair(
    target: str | Path | None,
    draft: str | Path | None,
    load: LoadConfig,
    device: str | None = None,
    prepack_linears: bool | None = None,
) -> FoundPair:
    """Find a pair and settle how it is loaded; everything that can be refused is refused here, before any long work.

    Parameters
    ----------
    target, draft : str or Path or None
        Folders or hub ids; the embedded pair where neither is named.
    load : LoadConfig
        The precisions asked for.
    device : str, optional
        "cpu", "cuda", "cuda:1", …; None takes CUDA where there is one.
    prepack_linears : bool, optional
        Lay the weights of linear layers out for oneDNN (`hf.prepack`); None does so wherever it works.

    Raises
    ------
    ValueError
        For what a caller can change: a missing folder, an unsupported architecture, a precision or device that cannot
        be had here.
    """
    on = resolve_device(device)
    sources = resolve_pair(target, draft)
    configs = load_config(sources[0]), load_config(sources[1])
    check_pair(*configs)
    precisions = resolve_precisions(*configs, load, on)
    packs = tuple(prepack_linears is not False and can_prepack(on, each.dtype) for each in precisions)
    if prepack_linears and not all(packs):
        refused = precisions[packs.index(False)].name
        raise ValueError(f"linear layers cannot be prepacked on {on} in {refused}; leave prepack_linears out")
    return FoundPair(
        sources=sources,
        configs=configs,
        tokenizers=load_tokenizers(*sources),
        precisions=precisions,
        packs=(packs[0], packs[1]),
        device=on,
        predictors=shipped_predictors(target),
    )


def _load_model(source: str, precision: Precision, device: torch.device) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # A bar for a model that loads in milliseconds is noise; a large one keeps it.
    quiet = Path(source).is_relative_to(ASSETS)
    shown = transformers_logging.is_progress_bar_enabled()
    if quiet:
        transformers_logging.disable_progress_bar()
    try:
        options = precision.load_options(device)
        # Without attn_implementation: SDPA, or eager attention for those that have none (GPT-OSS).
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ImportError, SafetensorError) as error:
        raise ValueError(f"cannot load the weights of {source!r}: {error}") from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    model.eval()
    if "device_map" in options:
        return model
    try:
        model.to(device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"cannot put the model on device {str(device)!r}: {error}") from error
    return model
