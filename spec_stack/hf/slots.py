"""The slots of the cache that the tokens of one forward see, by the original position of every slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Tokens up to which a mask is kept for the layers to come.
_MAX_CACHED = 64


class KeysCached(Exception):  # noqa: N818
    """Ends a forward at the last attention layer it is needed for, once that layer has cached its keys and values."""


@dataclass(frozen=True)
class Seen:
    """The slots that a layer shows to the newest tokens: `first` is the oldest that any of them sees, sinks aside.

    window: width in positions, the token itself included; None where each sees everything from `first` up to itself.
    num_sinks: slots at the beginning of the cache that are seen beside the window.
    """

    first: int = 0
    window: int | None = None
    num_sinks: int = 0


class SlotPositions:
    """The original positions of all cache slots during one forward, the forward's own tokens last.

    window, num_sinks: a layer that sees everything shows each token only the window's positions up to itself and the
    positions below num_sinks; a layer with a window of its own keeps the smaller one, without sinks. last_layer: the
    attention layer at which the forward ends, once its keys and values are cached. narrow_layer: past this layer's keys
    and values only the newest num_wanted tokens go on. on_layer: called with each attention layer's index; an exception
    of it ends the forward.
    """

    def __init__(
        self, positions: Sequence[int], window: int | None = None, num_sinks: int = 0, last_layer: int | None = None
    ) -> None:
        self.positions = positions
        self.last_layer = last_layer
        self.narrow_layer: int | None = None
        self.num_wanted = 0
        self.on_layer: Callable[[int], None] | None = None
        self._window = window
        self._num_sinks = bisect_left(positions, num_sinks)
        self._masks: dict[tuple[int, int, Seen, torch.device], torch.Tensor] = {}

    def seen(self, num_queries: int, layer_window: int | None) -> Seen:
        """What a layer with this window of its own (None: it has none) shows to the newest num_queries
        tokens."""
        window, num_sinks = layer_window, 0
        if self._window is not None and (layer_window is None or self._window < layer_window):
            window, num_sinks = self._window, self._num_sinks if layer_window is None else 0
        if window is None:
            return Seen()
        first = bisect_left(self.positions, self.positions[-num_queries] - window + 1)
        if first <= num_sinks:
            # The window goes on from the sinks: nothing lies between that no token sees.
            first = 0
        elif num_sinks:
            return Seen(first, window, num_sinks)
        # What the newest token's window leaves out, up to the first slot that is no sink.
        behind = max(first, num_sinks)
        hides = behind < len(self.positions) and self.positions[-1] - self.positions[behind] >= window
        return Seen(first, window, num_sinks) if hides else Seen(first)

    def shown(self, start: int, seen: Seen) -> tuple[int, int]:
        """Which slots the tokens from slot `start` on see: the first so many, and those from the second number on."""
        if seen.window is None:
            return 0, seen.first
        first = bisect_left(self.positions, self.positions[start] - seen.window + 1)
        return (0, 0) if first <= seen.num_sinks else (seen.num_sinks, first)

    def mask(self, start: int, stop: int, seen: Seen, device: torch.device) -> torch.Tensor:
        """What the tokens of the slots start…stop - 1 see of the slots that are `shown` to them up to their
        own: bool (1, 1, stop - start, num_shown)."""
        key = start, stop, seen, device
        mask = self._masks.get(key)
        if mask is None:
            mask = self._build(start, stop, seen, device)
            # Layer after layer a short block has the same mask; those of a long one together would be a dense mask.
            if stop == len(self.positions) and stop - start <= _MAX_CACHED:
                self._masks[key] = mask
        return mask

    def _build(self, start: int, stop: int, seen: Seen, device: torch.device) -> torch.Tensor:
        num_front, first = self.shown(start, seen)
        if seen.window is None:
            causal = torch.ones(stop - start, stop - first, dtype=torch.bool, device=device)
            return causal.tril(start - first)[None, None]
        positions = [*self.positions[:num_front], *self.positions[first:stop]]
        keys = torch.tensor(positions, device=device)
        distance = keys[start - stop :, None] - keys[None]
        visible = distance < seen.window
        visible[:, : max(num_front, seen.num_sinks - first)] = True
        return (visible & (distance >= 0))[None, None]

    def regular_from(self, seen: Seen) -> int:
        """The first slot from which every token has all sinks before its window and a slot for every position in it."""
        if seen.window is None:
            return len(self.positions)
        end = self.positions[-1] - (len(self.positions) - 1)
        run = bisect_left(range(len(self.positions)), end, key=lambda slot: self.positions[slot] - slot)
        return max(run, seen.num_sinks) + seen.window - 1


class RestoredSlots(SlotPositions):
    """Slots of which some came back at positions before those of older ones.

    A token sees every slot written before it; where a layer slides, those less than its window away, before it or
    after.
    """

    def seen(self, num_queries: int, layer_window: int | None) -> Seen:
        return Seen(window=layer_window)

    def shown(self, start: int, seen: Seen) -> tuple[int, int]:
        return 0, 0

    def regular_from(self, seen: Seen) -> int:
        return len(self.positions)

    def _build(self, start: int, stop: int, seen: Seen, device: torch.device) -> torch.Tensor:
        visible = torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start)
        if seen.window is not None:
            positions = torch.tensor(self.positions[:stop], device=device)
            visible &= (positions[start:, None] - positions[None]).abs() < seen.window
        return visible[None, None]
