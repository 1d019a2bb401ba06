"""A session's file: its contents, and the settings that must match to continue it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.engine.conversation import Conversation
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.prefill.calibration import fingerprint
from spec_stack.prefill.prompt_text import ChatTurn

VERSION = 5
_KIND = "spec_stack session"
# They decide over later text alone; a GPU's threshold is counted.
_NO_SETTINGS = ("given", "calibrated_by", "min_prompt_tokens", "max_dropped_attention", "check_tokens", "check_rates")
_NUM_PROBED = 8
# Of the largest logit: the change that another kernel, thread count or device may cause.
_TOLERANCE = 0.01


def save_conversation(
    conversation: Conversation, path: str | Path, config: SessionConfig, pair: ModelPair, prefill: PrefillConfig
) -> None:
    """Write one safetensors file, replacing an earlier one atomically, with its mode and behind a link to it. Raises
    ValueError where it cannot be written."""
    tensors = {"token_ids": torch.tensor(conversation.token_ids, dtype=torch.long)} | _probes(pair)
    for role, model in (("target", conversation.target), ("draft", conversation.draft_cache)):
        contents = model.contents()
        tensors |= {f"{role}.{name}": tensor.detach().cpu().contiguous() for name, tensor in contents.items()}
    header = {
        "version": VERSION,
        "asked": conversation.last_turn,
        "made_with": _made_with(pair, prefill),
        "config": asdict(config),
        "encoded": None if conversation.encoded is None else asdict(conversation.encoded),
    }
    file, part = Path(os.path.realpath(path)), None
    try:
        _check_replaceable(file)
        handle, part = tempfile.mkstemp(prefix=f"{file.name}.", suffix=".part", dir=file.parent)
        os.close(handle)
        save_file(tensors, part, {"kind": _KIND, "session": json.dumps(header), "digest": _digest(tensors)})
        if file.exists():
            shutil.copymode(file, part)
        os.replace(part, file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with suppress(OSError):
            if part is not None:
                os.unlink(part)


def _check_replaceable(file: Path) -> None:
    """Raise OSError for what is no file, or may not be written."""
    if file.is_dir():
        raise IsADirectoryError("it is a folder; name a file in it")
    if file.is_symlink():
        raise OSError("its links lead in a circle")
    if file.exists() and not file.is_file():
        raise OSError("it is a pipe or a device; name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError("it may not be written")


def load_conversation(
    conversation: Conversation, path: str | Path, pair: ModelPair, prefill: PrefillConfig
) -> SessionConfig:
    """Fill an empty conversation from a file; its session's configuration. Raises ValueError for a damaged file, or one
    of another pair or configuration."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if metadata.get("kind") != _KIND:
            raise ValueError("it was not made by Session.save")
        header = json.loads(metadata["session"])
        if header["version"] != VERSION:
            raise ValueError(f"it is of version {header['version']}, and this is {VERSION}")
        if metadata["digest"] != _digest(tensors):
            raise ValueError("its tensors are not those that were saved")
        encoded, config = _encoded(header["encoded"]), SessionConfig(**header["config"])
        made_with, token_ids = header["made_with"], tensors["token_ids"].tolist()
        start, stop = header["asked"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot take {path} for a session: {error}") from error
    _check_made_with(made_with, _made_with(pair, prefill))
    for name, probe in _probes(pair).items():
        if not torch.allclose(tensors[name], probe, rtol=0, atol=_TOLERANCE * float(probe.abs().max())):
            role = name.split(".")[1]
            raise ValueError(f"the session was made with another {role}: of the same shape, with other weights")
    conversation.token_ids, conversation.encoded, conversation.last_turn = token_ids, encoded, (start, stop)
    conversation.target = conversation.target.filled(_part(tensors, "target."))
    conversation.draft_cache = conversation.draft_cache.filled(_part(tensors, "draft."))
    return config


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _encoded(values: dict[str, Any] | None) -> EncodedPrompt | None:
    if values is None:
        return None
    protected = [(start, stop) for start, stop in values["protected"]]
    turns = [ChatTurn(turn["role"], (turn["span"][0], turn["span"][1])) for turn in values["turns"]]
    return EncodedPrompt(**{**values, "protected": protected, "turns": turns})


def _made_with(pair: ModelPair, prefill: PrefillConfig) -> dict[str, Any]:
    """The settings that must match for a session to continue unchanged, as JSON."""
    vocabulary = "" if pair.tokenizer is None else json.dumps(sorted(pair.tokenizer.get_vocab().items()))
    values = {
        "target": fingerprint(text_config(pair.target.config)),
        "draft": fingerprint(text_config(pair.draft.config)),
        "precision": pair.precision,
        "draft_precision": pair.draft_precision,
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        "prefill": {name: value for name, value in asdict(prefill).items() if name not in _NO_SETTINGS},
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _check_made_with(saved: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        given: Any = saved.get(name)
        if given == value:
            continue
        if name != "prefill":
            raise ValueError(f"the session was made with another {name}: {given!r}, here {value!r}")
        if other := [f"{key}={given.get(key)!r}, here {value[key]!r}" for key in value if given.get(key) != value[key]]:
            raise ValueError(f"the session was made with another PrefillConfig: {'; '.join(other)}")


def _probes(pair: ModelPair) -> dict[str, torch.Tensor]:
    """Both models' logits after a few fixed tokens, to identify their weights."""
    probes = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        num_ids = min(_NUM_PROBED, text_config(model.config).vocab_size)
        logits = CachedModel(model, _NUM_PROBED).forward(range(num_ids), range(num_ids), 1)[0]
        probes[f"probe.{role}"] = logits.float().cpu()
    return probes
