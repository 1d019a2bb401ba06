"""The cache of a `CachedModel`: key/value slots, which can be dropped, and recurrent states, which cannot.
Sliding-window layers keep every slot, so that a rollback past the window works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy as shallow_copy
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from spec_stack.devices import to_device
from spec_stack.hf.versions import cache_parameter, state_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET = 256
"""Slots by which a layer's buffers grow, so that the cache is copied only once per this many tokens."""
# Attributes of recurrent states, and the options of `lazy_initialization` that allocate them.
_STATES = ("conv_states", "recurrent_states")
_MAX_SNAPSHOTS = 17


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer whose keys and values are views on larger buffers, into which it appends.

    transformers copies all keys and values to append one token, a tenth of a step and more with thousands cached.
    """

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

    def unshare(self) -> None:
        """Drop the spare room, so that the next append copies into new buffers and leaves these tensors unchanged."""
        self._buffers = {}

    def reserve(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers of keys and values, grown to num_slots or more. For a layer with contents."""
        used = self.keys.shape[-2]
        keys = self._buffer("keys", self.keys, self.keys, num_slots)
        values = self._buffer("values", self.values, self.values, num_slots)
        self.keys, self.values = keys[..., :used, :], values[..., :used, :]
        return keys, values

    def show(self, num_slots: int) -> None:
        """Take the first num_slots of the buffers for cached, after writes past the contents."""
        self.keys, self.values = (self._buffers[name][..., :num_slots, :] for name in ("keys", "values"))

    def _append(self, name: str, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        used = cached.shape[-2] if cached.numel() else 0
        total = used + new.shape[-2]
        buffer = self._buffer(name, cached, new, total)
        buffer[..., used:total, :] = new
        return buffer[..., :total, :]

    def _buffer(self, name: str, cached: torch.Tensor, like: torch.Tensor, num_slots: int) -> torch.Tensor:
        """The buffer that holds the cached slots, renewed where num_slots do not fit: whole buckets of zeros."""
        used = cached.shape[-2] if cached.numel() else 0
        buffer = self._buffers.get(name)
        fits = buffer is not None and num_slots <= buffer.shape[-2] and buffer.device == like.device
        if buffer is None or not fits or (used and cached.data_ptr() != buffer.data_ptr()):
            buffer = like.new_zeros(*like.shape[:-2], BUCKET * -(-num_slots // BUCKET), like.shape[-1])
            if used:
                buffer[..., :used, :] = cached
            self._buffers[name] = buffer
        return buffer


def cache_argument(model: PreTrainedModel, cache: DynamicCache) -> dict[str, DynamicCache]:
    """The cache as a keyword argument of the model's forward, under its name there."""
    return {cache_parameter(model.__class__): cache}


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for this config; sliding-window layers keep every slot."""
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer() if getattr(layer, "is_sliding", False) or type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def last_attention_layer(cache: DynamicCache) -> int | None:
    """Index of the last caching layer, where a prefill may end; None where it has a recurrent state."""
    return len(cache.layers) - 1 if isinstance(cache.layers[-1], PreallocatedLayer) else None


def last_scoring_layer(cache: DynamicCache, num_layers: int) -> int:
    """Index of the last attention layer among the first num_layers, or else of the first attention layer."""
    with_keys = [index for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)]
    return max((index for index in with_keys if index < num_layers), default=with_keys[0])


def fork(cache: DynamicCache) -> DynamicCache:
    """A copy that shares keys and values until either one appends; states are copied at once."""
    other = shallow_copy(cache)
    other.layers = []
    for layer in cache.layers:
        shares = isinstance(layer, PreallocatedLayer)
        other.layers.append(shallow_copy(layer) if shares else deepcopy(layer))
        if shares:
            layer.unshare()
            other.layers[-1].unshare()
    return other


def contents(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """All keys, values and states by "cache.layer.name", for `fill`. Not copied."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            found |= {f"cache.{index}.keys": layer.keys, f"cache.{index}.values": layer.values}
    return found | dict(_states(cache))


def fill(cache: DynamicCache, found: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Load `contents` into an empty cache of the same model."""
    for index, layer in enumerate(cache.layers):
        if f"cache.{index}.keys" in found:
            layer.update(*(found[f"cache.{index}.{name}"].to(device) for name in ("keys", "values")))
        for name in _STATES:
            for at in getattr(layer, name, {}):
                state = found.get(f"cache.{index}.{name}.{at}")
                if state is not None:
                    layer.lazy_initialization(**{name: state.to(device)}, state_idx=at)
                    getattr(layer, name)[at].copy_(state)
                    layer.has_previous_state[at] = True


def keep_slots(cache: DynamicCache, slots: Sequence[int], device: torch.device) -> None:
    """Keep only these slots of every attention layer."""
    # An empty list would give a float tensor.
    index = to_device(torch.tensor(slots, dtype=torch.long), device)
    for layer in _attention_layers(cache):
        # A split model's layers are on several devices.
        index = index.to(layer.keys.device)
        layer.keys = layer.keys.index_select(2, index)
        layer.values = layer.values.index_select(2, index)


def crop(cache: DynamicCache, num_slots: int, first_layer: int = 0) -> None:
    """Keep the first num_slots slots of every attention layer from first_layer on; recurrent states are unchanged."""
    for layer in _attention_layers(cache, first_layer):
        # After an aborted forward either tensor may be uninitialized.
        layer.keys, layer.values = (
            tensor[:, :, :num_slots] if tensor.numel() else tensor for tensor in (layer.keys, layer.values)
        )


def reserve(cache: DynamicCache, num_slots: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The whole buffers of keys and of values by layer, with room for num_slots; for a cache with contents."""
    keys, values = zip(*(layer.reserve(num_slots) for layer in cache.layers), strict=True)
    return list(keys), list(values)


def show(cache: DynamicCache, num_slots: int) -> None:
    """Take the first num_slots of all reserved buffers for cached."""
    for layer in cache.layers:
        layer.show(num_slots)


def _attention_layers(cache: DynamicCache, first_layer: int = 0) -> Iterable[Any]:
    return [layer for layer in cache.layers[first_layer:] if getattr(layer, "keys", None) is not None]


class States:
    """Snapshots of a cache's recurrent states (linear attention, Mamba); none under an older transformers."""

    def __init__(self, cache: DynamicCache) -> None:
        self._can_copy = not state_refusal()
        self._cache = cache
        self._snapshots: list[tuple[int, list[torch.Tensor]]] = []

    def take(self, num_slots: int) -> None:
        """Copy the states after num_slots tokens."""
        latest = self._snapshots[-1][0] if self._snapshots else 0
        if self._can_copy and num_slots > latest and len(self._snapshots) < _MAX_SNAPSHOTS:
            self._snapshots.append((num_slots, [state.clone() for _, state in _states(self._cache)]))

    def restore(self, num_left: int) -> int:
        """Restore the latest snapshot of at most num_left tokens and return its length; 0 if there is none."""
        while self._snapshots and self._snapshots[-1][0] > num_left:
            self._snapshots.pop()
        if not self._snapshots:
            return 0
        num_slots, copies = self._snapshots[-1]
        for (_, state), copied in zip(_states(self._cache), copies, strict=True):
            state.copy_(copied)
        crop(self._cache, num_slots)
        return num_slots

    def keep_latest(self) -> None:
        del self._snapshots[:-1]


def _states(cache: DynamicCache) -> Iterator[tuple[str, torch.Tensor]]:
    """The recurrent states by "cache.layer.name.index"."""
    for index, layer in enumerate(cache.layers):
        for name in _STATES:
            states = getattr(layer, name, {})
            yield from ((f"cache.{index}.{name}.{at}", state) for at, state in states.items() if state is not None)
