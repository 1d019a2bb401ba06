"""Cache slots visible to a forward's tokens, by the original position of each slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Most tokens of a forward whose mask is cached across layers.
_MAX_CACHED = 64


class KeysCached(Exception):  # noqa: N818
    """Aborts a forward at the last needed attention layer, once its keys and values are cached."""


@dataclass(frozen=True)
class Seen:
    """Slots that a layer shows to the newest tokens: num_sinks leading ones, and those from `first` on within a window
    in positions, the token included; None is causal."""

    first: int = 0
    window: int | None = None
    num_sinks: int = 0


class SlotPositions:
    """Original positions of all cache slots during a forward, its own tokens last. window, num_sinks: of full-attention
    layers. last_layer: where the forward ends. on_piece: as in `CachedModel`. num_layers: that run."""

    def __init__(
        self, positions: Sequence[int], window: int | None = None, num_sinks: int = 0, last_layer: int | None = None
    ) -> None:
        self.positions = positions
        self.last_layer = last_layer
        self.on_piece: Callable[[int, float], None] | None = None
        self.num_layers = 1
        self._window = window
        self._num_sinks = bisect_left(positions, num_sinks)
        self._masks: dict[tuple[int, int, Seen, torch.device], torch.Tensor] = {}

    def seen(self, num_queries: int, layer_window: int | None) -> Seen:
        """Slots that a layer with this own window (None: full attention) shows to the newest num_queries tokens."""
        window, num_sinks = layer_window, 0
        if self._window is not None and (layer_window is None or self._window < layer_window):
            window, num_sinks = self._window, self._num_sinks if layer_window is None else 0
        if window is None:
            return Seen()
        first = bisect_left(self.positions, self.positions[-num_queries] - window + 1)
        if first <= num_sinks:
            # The window continues the sinks: there is no gap.
            first = 0
        elif num_sinks:
            return Seen(first, window, num_sinks)
        # Slots outside the newest token's window, after the sinks.
        behind = max(first, num_sinks)
        hides = behind < len(self.positions) and self.positions[-1] - self.positions[behind] >= window
        return Seen(first, window, num_sinks) if hides else Seen(first)

    def hides_older(self, num_queries: int) -> bool:
        """Whether a slot before the newest num_queries tokens is hidden from one of them in every layer."""
        return False

    def num_from(self, position: int, num_queries: int) -> int:
        """How many of the newest num_queries tokens are at a position or behind it."""
        num_slots = len(self.positions)
        return num_slots - bisect_left(self.positions, position, num_slots - num_queries)

    def shown(self, start: int, seen: Seen) -> tuple[int, int]:
        """Slots visible from slot `start` on: the number of leading slots, and the first slot of the rest."""
        if seen.window is None:
            return 0, seen.first
        first = bisect_left(self.positions, self.positions[start] - seen.window + 1)
        return (0, 0) if first <= seen.num_sinks else (seen.num_sinks, first)

    def mask(self, start: int, stop: int, seen: Seen, device: torch.device) -> torch.Tensor:
        """Mask of slots start…stop - 1 over their `shown` slots: bool (1, 1, stop - start, num_shown)."""
        key = start, stop, seen, device
        mask = self._masks.get(key)
        if mask is None:
            mask = self._build(start, stop, seen, device)
            # Layers share a short block's mask; a long block's masks would add up to a dense one.
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
        """The first slot from which every token has all sinks before a window without gaps."""
        if seen.window is None:
            return len(self.positions)
        end = self.positions[-1] - (len(self.positions) - 1)
        run = bisect_left(range(len(self.positions)), end, key=lambda slot: self.positions[slot] - slot)
        return max(run, seen.num_sinks) + seen.window - 1


class RecalledSlots(SlotPositions):
    """Slots of which some were recalled at earlier positions, before the slot recalled_end. A token attends to earlier
    positions alone, of the slots that were written before it."""

    def __init__(
        self, positions: Sequence[int], window: int | None, num_sinks: int, last_layer: int | None, recalled_end: int
    ) -> None:
        super().__init__(positions, window, num_sinks, last_layer)
        self._recalled_end = recalled_end

    def seen(self, num_queries: int, layer_window: int | None) -> Seen:
        return Seen(window=layer_window)

    def hides_older(self, num_queries: int) -> bool:
        return len(self.positions) - num_queries < self._recalled_end

    def shown(self, start: int, seen: Seen) -> tuple[int, int]:
        return 0, 0

    def regular_from(self, seen: Seen) -> int:
        return len(self.positions)

    def _build(self, start: int, stop: int, seen: Seen, device: torch.device) -> torch.Tensor:
        positions = torch.tensor(self.positions[:stop], device=device)
        distance = positions[start:, None] - positions[None]
        visible = (distance >= 0).tril(start)
        if seen.window is not None:
            visible &= distance < seen.window
        return visible[None, None]
