"""A model that inserts recalled tokens into its cached text."""

from __future__ import annotations

from spec_stack.hf.fixed_step import FixedCache
from spec_stack.hf.model import CachedModel
from spec_stack.hf.slots import InsertedSlots, RecalledSlots, SlotPositions


class InsertingModel(CachedModel):
    """A `CachedModel` whose tokens attend to earlier positions alone, in whatever order they are written.

    Recalled tokens go behind all cached ones, of which nothing is prefilled again.
    """

    def truncate(self, position: int) -> None:
        """Drop all tokens from a position on. No other token has attended to them."""
        kept = [slot for slot, at in enumerate(self.positions) if at < position]
        self.rollback(self.num_cached - (kept[-1] + 1 if kept else 0))
        self.keep_slots(kept)

    def _open_fixed(self, num_tokens: int, num_more: int = 0) -> FixedCache | None:
        # A fixed forward masks by slot.
        return None if self._recalled_end > len(self.positions) else super()._open_fixed(num_tokens, num_more)

    def _open_slots(
        self, window: int | None = None, num_sinks: int = 0, last_layer: int | None = None
    ) -> SlotPositions:
        slots = super()._open_slots(window, num_sinks, last_layer)
        if not isinstance(slots, RecalledSlots):
            return slots
        return InsertedSlots(self.positions, window, num_sinks, last_layer, self._recalled_end)
