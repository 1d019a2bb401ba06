"""A model's first layers over a text, and its other layers over a part of it: scoring runs the first ones alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.hf.architectures import is_recurrent, is_supported, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EarlyLayers:
    """The hidden states that enter layer `end`, one per cache slot: what a model needs to go on from there.

    can_resume: False for a model that cannot be entered in its middle (a recurrent state, or forwards that Accelerate
    has wrapped); no states are kept then.
    """

    def __init__(self, model: PreTrainedModel, end: int) -> None:
        self._model, self.end = model, end
        self._path = _path_to_decoder(model)
        self.can_resume = self._path is not None
        self._entered: list[torch.Tensor] = []

    def first(self) -> PreTrainedModel:
        """The model whose layer `end` keeps what enters it."""
        return self._model if self._path is None else _with_layers(self._model, self._path, {self.end: self._keep})

    @property
    def share(self) -> float:
        """Share of the layers that have not run."""
        num_layers = int(text_config(self._model.config).num_hidden_layers)
        return (num_layers - self.end) / num_layers

    def _keep(self, run: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._entered.append(hidden)
        return run(hidden, *args, **kwargs)

    def _states(self) -> torch.Tensor:
        """All kept states: (1, num_slots, hidden_size)."""
        if len(self._entered) > 1:
            self._entered = [torch.cat(self._entered, 1)]
        return self._entered[0]

    def crop(self, num_slots: int) -> None:
        """Keep the states of the first num_slots slots."""
        if self._entered:
            self._entered = [self._states()[:, :num_slots]]

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep the states of these slots alone."""
        states = self._states()
        self._entered = [states[:, torch.tensor(slots, dtype=torch.long, device=states.device)]]

    def rest(self, first: int, last: int) -> PreTrainedModel:
        """The model that enters layer `end` with the states of slots first…last - 1, whatever it is fed."""
        states = self._states()[:, first:last]
        entering = dict.fromkeys(range(self.end), lambda *_, **__: states)
        return _with_layers(self._model, self._path or [], entering)

    def fork(self) -> EarlyLayers:
        """A copy that shares the states."""
        other = EarlyLayers(self._model, self.end)
        other._entered = list(self._entered)
        return other


def _path_to_decoder(model: PreTrainedModel) -> list[str] | None:
    """The names that lead to the module with the decoder layers; None where its layers cannot be replaced."""
    if not is_supported(model.config) or is_recurrent(text_config(model.config)):
        return None
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    # A hook of Accelerate holds the forward of the very module.
    is_hooked = any("_hf_hook" in vars(module) for module in (model, decoder))
    return None if is_hooked or not hasattr(decoder, "layers") else name.split(".") if name else []


def _with_layers(
    model: PreTrainedModel, path: Sequence[str], forwards: Mapping[int, Callable[..., Any]]
) -> PreTrainedModel:
    """The model with other forwards of some decoder layers, each given the layer's own as its first argument.
    The weights and all other modules are shared; the model itself stays as it is."""
    twin = module = _copy(model)
    for name in path:
        module._modules[name] = module = _copy(getattr(module, name))
    own = module.layers
    layers = module._modules["layers"] = _copy(own)
    for index, forward in forwards.items():
        layer = layers._modules[str(index)] = copy(own[index])
        layer.forward = partial(forward, own[index].forward)
    return twin


def _copy(module: Any) -> Any:
    """A module that shares everything with another, but can be given other children."""
    twin = copy(module)
    twin._modules = dict(module._modules)
    return twin
