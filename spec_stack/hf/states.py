"""Snapshots of recurrent states (linear attention, Mamba), which cannot be cropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from spec_stack.hf.cache import STATES, crop
from spec_stack.hf.versions import state_refusal

_MAX_SNAPSHOTS = 17


@dataclass(frozen=True)
class _State:
    """A state's place in the cache, and its copy."""

    states: dict[int, torch.Tensor]
    index: int
    copy: torch.Tensor


class States:
    """Snapshots of a cache's recurrent states; none under an older transformers."""

    def __init__(self, cache: DynamicCache) -> None:
        self._can_copy = not state_refusal()
        self._cache = cache
        self._snapshots: list[tuple[int, list[_State]]] = []

    def take(self, num_slots: int) -> None:
        """Copy the states after num_slots tokens."""
        latest = self._snapshots[-1][0] if self._snapshots else 0
        if self._can_copy and num_slots > latest and len(self._snapshots) < _MAX_SNAPSHOTS:
            self._snapshots.append((num_slots, list(self._copies())))

    def restore(self, num_left: int) -> int:
        """Restore the latest snapshot of at most num_left tokens and return its length; 0 if there is none."""
        while self._snapshots and self._snapshots[-1][0] > num_left:
            self._snapshots.pop()
        if not self._snapshots:
            return 0
        num_slots, copies = self._snapshots[-1]
        for each in copies:
            each.states[each.index].copy_(each.copy)
        crop(self._cache, num_slots)
        return num_slots

    def keep_latest(self) -> None:
        del self._snapshots[:-1]

    def _copies(self) -> Iterator[_State]:
        for layer in self._cache.layers:
            for name in STATES:
                states = getattr(layer, name, {})
                yield from (_State(states, at, state.clone()) for at, state in states.items() if state is not None)
