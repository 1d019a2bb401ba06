"""A conversation in a file: what a session holds, and what has to be alike where it is to go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.prefill.calibration import fingerprint

VERSION = 1
_KIND = "spec_stack session"
_NO_SETTINGS = ("given", "calibrated_by")
_NUM_PROBED = 8
# Of the largest logit: what another kernel, thread count or device may change of one.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class SavedSession:
    """The contents of a session.

    Parameters
    ----------
    token_ids : list of int
        The conversation.
    encoded : EncodedPrompt or None
        The last prompt as it was encoded, with its answer.
    target, index : mapping of str to torch.Tensor
        Contents of both caches (`CachedModel.contents`).
    config : SessionConfig
        The session's.
    """

    token_ids: list[int]
    encoded: EncodedPrompt | None
    target: Mapping[str, torch.Tensor]
    index: Mapping[str, torch.Tensor]
    config: SessionConfig

    def save(self, path: str | Path, pair: ModelPair, prefill: PrefillConfig) -> None:
        """Write one safetensors file, the rest as JSON in its header; an earlier one is replaced once this is whole.

        Raises ValueError where it cannot be written; nothing is left of it then.
        """
        tensors = {"token_ids": torch.tensor(self.token_ids, dtype=torch.long)}
        for role, contents in (("target", self.target), ("draft", self.index)):
            tensors |= {f"{role}.{name}": tensor.detach().cpu().contiguous() for name, tensor in contents.items()}
        tensors |= _probes(pair)
        header = {
            "version": VERSION,
            "made_with": _made_with(pair, prefill),
            "config": asdict(self.config),
            "encoded": None if self.encoded is None else asdict(self.encoded),
        }
        file = Path(path)
        part = file.with_name(f"{file.name}.part")
        try:
            if file.is_dir():
                raise IsADirectoryError("it is a folder; name a file in it")
            save_file(tensors, part, {"kind": _KIND, "session": json.dumps(header)})
            part.replace(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot write {file}: {error}") from error
        finally:
            with suppress(OSError):
                part.unlink()

    def check(self, pair: ModelPair) -> None:
        """Raise ValueError where a field holds what no session does; the message names it."""
        num_tokens = len(self.token_ids)
        _check_ids("token_ids", self.token_ids, pair.vocab_size)
        for role, contents in (("target", self.target), ("draft", self.index)):
            positions = _whole_numbers(f"{role}.positions", contents["positions"], 1)
            ids = _whole_numbers(f"{role}.token_ids", contents["token_ids"], 1)
            (end,) = _whole_numbers(f"{role}.restored_end", contents["restored_end"], 1)
            again = _whole_numbers(f"{role}.to_recompute", contents["to_recompute"], 2)
            if len(ids) != len(positions):
                raise ValueError(f"{role}.token_ids and {role}.positions differ in length")
            # It may be past the slots that are left after a rollback.
            if not 0 <= end <= max(pair.max_positions):
                raise ValueError(f"{role}.restored_end must lie in 0…{max(pair.max_positions)}")
            # What is held, and what there is to compute once more behind it, stand each at a place of their own.
            places = [*zip(ids, positions, strict=True), *map(tuple, again)]
            # Of a draft with another tokenizer it is not known how many tokens the conversation has.
            own = role == "target" or pair.translation is None
            last = num_tokens if own else pair.max_positions[1]
            taken = {at for _, at in places}
            if len(taken) != len(places) or any(not 0 <= at < last for at in taken):
                raise ValueError(f"{role}.positions and {role}.to_recompute must be distinct and lie in 0…{last - 1}")
            _check_ids(f"{role}.token_ids", [token for token, _ in places], _vocab_size(pair, role))
            if own and any(self.token_ids[at] != token for token, at in places):
                raise ValueError(f"{role}.token_ids must be the conversation's at {role}.positions")
            for name, tensor in contents.items():
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise ValueError(f"{role}.{name} holds values that are not finite")
        if self.encoded is not None:
            _check_encoded(self.encoded, pair.vocab_size)

    @classmethod
    def load(cls, path: str | Path, pair: ModelPair, prefill: PrefillConfig) -> SavedSession:
        """Read a file.

        Raises
        ------
        ValueError
            For a file that is no session, or of another version; and where it was made with another pair, tokenizer or
            configuration than this one, naming what differs.
        """
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if metadata.get("kind") != _KIND:
                raise ValueError("it was not made by Session.save")
            header = json.loads(metadata["session"])
            if header["version"] != VERSION:
                raise ValueError(f"it is of version {header['version']}, and this is {VERSION}")
            loaded = cls(
                token_ids=tensors["token_ids"].tolist(),
                encoded=_encoded(header["encoded"]),
                target=_part(tensors, "target."),
                index=_part(tensors, "draft."),
                config=SessionConfig(**header["config"]),
            )
            made_with = header["made_with"]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"cannot take {path} for a session: {error}") from error
        _check_made_with(made_with, _made_with(pair, prefill))
        try:
            loaded.check(pair)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"cannot take {path} for a session: {error}") from error
        for name, probe in _probes(pair).items():
            saved = tensors.get(name)
            if saved is None or not torch.allclose(saved, probe, rtol=0, atol=_TOLERANCE * float(probe.abs().max())):
                role = name.split(".")[1]
                raise ValueError(f"the session was made with another {role}: of the same shape, with other weights")
        return loaded


def _whole_numbers(name: str, tensor: torch.Tensor, num_dims: int) -> list[Any]:
    if tensor.dtype != torch.long or tensor.dim() != num_dims or (num_dims == 2 and tensor.shape[1] != 2):
        form = "a row of whole numbers" if num_dims == 1 else "pairs of token and position"
        raise ValueError(f"{name} must be {form}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    numbers: list[Any] = tensor.tolist()
    return numbers


def _vocab_size(pair: ModelPair, role: str) -> int:
    return int(text_config((pair.target if role == "target" else pair.draft).config).vocab_size)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise ValueError(f"{name} must lie in 0…{vocab_size - 1}, the vocabulary")


def _check_encoded(encoded: EncodedPrompt, vocab_size: int) -> None:
    _check_ids("encoded.token_ids", encoded.token_ids, vocab_size)
    num_tokens = len(encoded.token_ids)
    if not isinstance(encoded.text, str) or not isinstance(encoded.note, str):
        raise ValueError("encoded.text and encoded.note must be texts")
    if not _increase([edge for span in encoded.protected for edge in span], num_tokens):
        raise ValueError(f"encoded.protected must be spans in order within 0…{num_tokens}")


def _increase(numbers: Sequence[int], last: int) -> bool:
    """Return whether these are whole numbers of 0 to last, none smaller than the one before."""
    return (
        all(type(number) is int for number in numbers)
        and list(numbers) == sorted(numbers)
        and all(0 <= number <= last for number in numbers)
    )


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _encoded(values: dict[str, Any] | None) -> EncodedPrompt | None:
    if values is None:
        return None
    protected = [(start, stop) for start, stop in values["protected"]]
    # Files of before hold `cuts` too.
    known = {name: value for name, value in values.items() if name != "cuts"}
    return EncodedPrompt(**{**known, "protected": protected})


def _made_with(pair: ModelPair, prefill: PrefillConfig) -> dict[str, Any]:
    """Return what has to be alike for a session to go on as it would have, as JSON has it."""
    values = {
        "target": fingerprint(text_config(pair.target.config)),
        "draft": fingerprint(text_config(pair.draft.config)),
        "precision": pair.precision,
        "draft_precision": pair.draft_precision,
        "tokenizer": _tokenizer_hash(pair.tokenizer),
        "prefill": {name: value for name, value in asdict(prefill).items() if name not in _NO_SETTINGS},
    }
    loaded: dict[str, Any] = json.loads(json.dumps(values))
    return loaded


def _tokenizer_hash(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _check_made_with(saved: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        if saved.get(name) == value:
            continue
        if name == "prefill":
            given = saved.get(name) or {}
            other = [f"{key}={given.get(key)!r}, here {value[key]!r}" for key in value if given.get(key) != value[key]]
            raise ValueError(f"the session was made with another PrefillConfig: {'; '.join(other)}")
        raise ValueError(f"the session was made with another {name}: {saved.get(name)!r}, here {value!r}")


def _probes(pair: ModelPair) -> dict[str, torch.Tensor]:
    """The logits of both models after a few fixed tokens, which tell one set of weights from another."""
    probes = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        num_ids = min(_NUM_PROBED, text_config(model.config).vocab_size)
        logits = CachedModel(model, _NUM_PROBED).forward(range(num_ids), range(num_ids), 1)[0]
        probes[f"probe.{role}"] = logits.float().cpu()
    return probes
