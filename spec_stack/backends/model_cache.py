"""The cache behind a `CachedModel`: key/value slots that can be dropped, and recurrent states that cannot.

Sliding-window layers hold every slot: what a window shows is decided by position (`backends.attention`), and a rollback
past the window finds its keys. A recurrent state (linear attention, Mamba) has no slots: it is copied before the
tokens that may be rolled back, put back, and the tokens that stay are read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration, every attention layer of it at full length."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in cache.layers]
    return cache


def is_stateful(cache: DynamicCache) -> bool:
    """Whether some layer has a recurrent state."""
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


def keep_slots(cache: DynamicCache, slots: Sequence[int], device: torch.device) -> None:
    """Keep only these slots of every attention layer."""
    index = torch.tensor(slots, device=device)
    for layer in _attention_layers(cache):
        layer.keys = layer.keys.index_select(2, index)
        layer.values = layer.values.index_select(2, index)


def crop(cache: DynamicCache, num_slots: int) -> None:
    """Keep the first num_slots slots of every attention layer; recurrent states stay as they are."""
    for layer in _attention_layers(cache):
        layer.keys = layer.keys[:, :, :num_slots]
        layer.values = layer.values[:, :, :num_slots]


def _attention_layers(cache: DynamicCache) -> Iterator[Any]:
    return (layer for layer in cache.layers if getattr(layer, "keys", None) is not None)


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of every recurrent state as it was when num_slots tokens had been read."""

    num_slots: int
    _states: list[tuple[dict[int, torch.Tensor], int, torch.Tensor]]

    @classmethod
    def take(cls, cache: DynamicCache, num_slots: int) -> StateSnapshot:
        return cls(num_slots, [(states, index, states[index].clone()) for states, index in _states(cache)])

    def restore(self, cache: DynamicCache) -> None:
        """Put the states back and drop the later slots. The cache is the one the snapshot was taken of."""
        for states, index, copy in self._states:
            states[index].copy_(copy)
        crop(cache, self.num_slots)


def _states(cache: DynamicCache) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    """Where each state tensor of the cache is: the convolution's last inputs, and the recurrent state proper."""
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            yield from ((states, index) for index, state in states.items() if state is not None)
