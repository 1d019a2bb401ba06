"""A layer of a KV cache that writes new tokens into room it has set aside.

transformers' growing cache copies all keys and values in every forward to append a token's; with thousands of tokens
cached that is a tenth of a step and more (experiments/bench_cache.py).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

# Slots set aside whenever there is no room left; so one forward in so many copies the cache.
_ROOM = 256


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer whose keys and values are the beginnings of larger buffers. Cropping shortens them, and the slots
    are written again; tensors put in their place (a selection of slots) move into new buffers with the next tokens."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[str, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        used = cached.shape[-2] if cached.numel() else 0
        total = used + new.shape[-2]
        buffer = self._buffers.get(name)
        if buffer is None or total > buffer.shape[-2] or (used and cached.data_ptr() != buffer.data_ptr()):
            buffer = new.new_empty(*new.shape[:-2], total + _ROOM, new.shape[-1])
            if used:
                buffer[..., :used, :] = cached
            self._buffers[name] = buffer
        buffer[..., used:total, :] = new
        return buffer[..., :total, :]
