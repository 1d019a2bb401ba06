"""What models are fed, forward by forward, and a forward that fails: by hooks of torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Forward:
    """positions: empty where the model takes none."""

    token_ids: list[int]
    positions: list[int]


@contextmanager
def forwards_of(*models: PreTrainedModel) -> Iterator[list[Forward]]:
    """The forwards of these models inside the block."""
    seen: list[Forward] = []

    def note(module: Any, args: Any, named: dict[str, Any]) -> None:
        positions = named.get("position_ids")
        seen.append(Forward(named["input_ids"][0].tolist(), [] if positions is None else positions[0].tolist()))

    hooks = [model.register_forward_pre_hook(note, with_kwargs=True) for model in models]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def failing(module: nn.Module, call: int, error: BaseException) -> Iterator[None]:
    """Forward number `call` of a module, from 0 on, raises this error inside the block."""
    calls = count()

    def fail(*_: Any) -> None:
        if next(calls) == call:
            raise error

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def sizes_of(forwards: list[Forward]) -> list[int]:
    return [len(each.token_ids) for each in forwards]


def positions_of(forwards: list[Forward]) -> list[int]:
    return [position for each in forwards for position in each.positions]


def tokens_of(forwards: list[Forward]) -> list[int]:
    return [token_id for each in forwards for token_id in each.token_ids]
