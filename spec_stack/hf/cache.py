"""The cache behind a `CachedModel`: key/value slots that can be dropped, and recurrent states that cannot.

Sliding-window layers hold every slot: a window is applied by position (`hf.attention`), and a rollback past the window
finds its keys. Recurrent states have no slots (`hf.states`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy as shallow_copy
from copy import deepcopy
from functools import cache as remember
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("cache", "past_key_values")
"""What a forward calls its cache: transformers from 5.24 on, and before it."""
# Slots set aside whenever there is no room left; so one forward in so many copies the cache.
_ROOM = 256
# Memory over what the slots take from which `compact` copies them: less than a twentieth stays.
_MOST_SLACK = 1.05
# What a layer calls its states, and the options of `lazy_initialization` that make room for them.
STATES = ("conv_states", "recurrent_states")


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer that writes new tokens into room it has set aside.

    transformers' growing cache copies all keys and values in every forward to append a token's; with thousands of
    tokens cached that is a tenth of a step and more (experiments/LOG.md). Here they are the beginnings of
    larger buffers. Cropping shortens them, and the slots are written again; tensors put in their place (a selection of
    slots) move into new buffers with the next tokens.
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
        """Give up the room set aside: the next tokens move into new buffers, and leave these tensors as they are."""
        self._buffers = {}

    def _append(self, name: str, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        used = cached.shape[-2] if cached.numel() else 0
        total = used + new.shape[-2]
        buffer = self._buffers.get(name)
        fits = buffer is not None and total <= buffer.shape[-2] and buffer.device == new.device
        if buffer is None or not fits or (used and cached.data_ptr() != buffer.data_ptr()):
            buffer = new.new_empty(*new.shape[:-2], total + _ROOM, new.shape[-1])
            if used:
                buffer[..., :used, :] = cached
            self._buffers[name] = buffer
        buffer[..., used:total, :] = new
        return buffer[..., :total, :]


@remember
def _name_of(kind: type[PreTrainedModel]) -> str:
    # Loading a model has imported it; a name of this package alone has not.
    from transformers import GenerationMixin

    newer, older = CACHE_NAMES
    has_newer = newer in signature(GenerationMixin.prepare_inputs_for_generation).parameters
    # Code that comes with a checkpoint may have the older name under a newer transformers.
    return older if older in signature(kind.forward).parameters or not has_newer else newer


def cache_argument(model: PreTrainedModel, cache: DynamicCache) -> dict[str, DynamicCache]:
    """The cache as a keyword argument of the model's forward, under the name that it has there."""
    return {_name_of(model.__class__): cache}


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration, every attention layer of it at full length."""
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer() if getattr(layer, "is_sliding", False) or type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def last_attention_layer(cache: DynamicCache) -> int | None:
    """Index of the last layer that keeps anything of its tokens, if it keeps keys alone; None where a recurrent state
    comes with the keys or after them. A prefill may end there, once these are cached."""
    last = len(cache.layers) - 1
    return last if isinstance(cache.layers[last], PreallocatedLayer) else None


def last_scoring_layer(cache: DynamicCache, num_layers: int) -> int:
    """Index of the last layer with keys among the first num_layers; of the first one with keys where there is none."""
    with_keys = [index for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)]
    return max((index for index in with_keys if index < num_layers), default=with_keys[0])


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache with the same contents: keys and values are shared until one of the two appends, states are copied."""
    other = shallow_copy(cache)
    other.layers = [_fork_layer(layer) for layer in cache.layers]
    return other


def _fork_layer(layer: Any) -> Any:
    if not isinstance(layer, PreallocatedLayer):
        return deepcopy(layer)
    other = shallow_copy(layer)
    layer.unshare()
    other.unshare()
    return other


def contents(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """All keys, values and states by "layer.name", which `fill` puts into a new cache. Not copied."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            found |= {f"{index}.keys": layer.keys, f"{index}.values": layer.values}
        for name in STATES:
            states = getattr(layer, name, {})
            found |= {f"{index}.{name}.{at}": state for at, state in states.items() if state is not None}
    return found


def fill(cache: DynamicCache, found: Mapping[str, torch.Tensor]) -> None:
    """Put what `contents` gave of a cache into an empty one of the same model. Raises ValueError for what has no
    place in it."""
    placed = 0
    for index, layer in enumerate(cache.layers):
        if f"{index}.keys" in found and isinstance(layer, DynamicLayer):
            layer.update(found[f"{index}.keys"], found[f"{index}.values"])
            placed += 2
        for name in STATES:
            for at in getattr(layer, name, {}):
                state = found.get(f"{index}.{name}.{at}")
                if state is not None:
                    layer.lazy_initialization(**{name: state}, state_idx=at)
                    getattr(layer, name)[at].copy_(state)
                    layer.has_previous_state[at] = True
                    placed += 1
    if placed != len(found):
        raise ValueError(f"{len(found) - placed} of {len(found)} tensors have no place in this model's cache")


def num_slots(cache: DynamicCache) -> int | None:
    """Slots of every attention layer; None for a model without one. Raises ValueError where layers differ."""
    lengths = {layer.keys.shape[-2] if layer.keys.numel() else 0 for layer in _attention_layers(cache)}
    if len(lengths) > 1:
        raise ValueError(f"its layers hold {sorted(lengths)} slots")
    return lengths.pop() if lengths else None


def keep_slots(cache: DynamicCache, slots: Sequence[int], device: torch.device) -> None:
    """Keep only these slots of every attention layer."""
    # Of no slots at all the type would be another.
    index = torch.tensor(slots, dtype=torch.long, device=device)
    for layer in _attention_layers(cache):
        # Layers of a model that is split stand on several devices.
        index = index.to(layer.keys.device)
        layer.keys = layer.keys.index_select(2, index)
        layer.values = layer.values.index_select(2, index)


def crop(cache: DynamicCache, num_slots: int) -> None:
    """Keep the first num_slots slots of every attention layer; recurrent states stay as they are."""
    for layer in _attention_layers(cache):
        # A forward that ended early may have left either without its first slots.
        layer.keys, layer.values = (
            tensor[:, :, :num_slots] if tensor.numel() else tensor for tensor in (layer.keys, layer.values)
        )


def compact(cache: DynamicCache) -> None:
    """Move keys and values that lie in larger buffers into memory of their own size.

    Cropping shortens a view, and the buffer behind it stays as long as the view: right for a cache that goes on,
    which writes there again, and not for one that is put away.
    """
    for layer in _attention_layers(cache):
        layer.keys, layer.values = _fitted(layer.keys), _fitted(layer.values)
        if isinstance(layer, PreallocatedLayer):
            layer.unshare()


def _fitted(tensor: torch.Tensor) -> torch.Tensor:
    needed = tensor.numel() * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() > _MOST_SLACK * needed else tensor


def _attention_layers(cache: DynamicCache) -> Iterator[Any]:
    return (layer for layer in cache.layers if getattr(layer, "keys", None) is not None)
