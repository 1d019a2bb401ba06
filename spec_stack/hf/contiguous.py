"""A model that numbers its cached tokens as a contiguous prompt: position equals cache slot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.hf import cache as model_cache
from spec_stack.hf.architectures import rope_switch
from spec_stack.hf.attention import is_installed
from spec_stack.hf.fixed_step import FixedStep
from spec_stack.hf.model import CachedModel
from spec_stack.hf.slots import SlotPositions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Most rows of logits per forward.
_MOST_LOGITS = 128
# A long RoPE stores its angles in the model, which requests share.
_angles = threading.Lock()


class ContiguousModel(CachedModel):
    """A `CachedModel` for any architecture: callers use positions of the full text, the model gets slot indices. Past
    its switch length a long RoPE changes all angles, and the cache is recomputed, as in transformers."""

    def __init__(
        self, model: PreTrainedModel, prefill_chunk: int, num_ids: int | None = None, step: FixedStep | None = None
    ) -> None:
        super().__init__(model, prefill_chunk, num_ids, step)
        self._is_installed = is_installed(model)
        if not self._is_installed:
            # Its forwards run to the end.
            self._last_layer = None
        parameters = signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        switch = rope_switch(model.config)
        self._switch = sys.maxsize if switch is None else switch
        if switch is not None:
            # The first piece of a long prompt must be past the switch.
            self._most_in_piece = max(self._most_in_piece, switch + _MOST_LOGITS)

    @property
    def can_recall(self) -> bool:
        """True: recalled tokens are inserted at their position after a rollback."""
        return True

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """As `CachedModel.forward`; tokens before and after a RoPE switch run separately."""
        room = self._switch - self.num_cached
        num_late = len(token_ids) - room
        if room <= 0 or not 0 < num_late < num_logits:
            return super().forward(token_ids, positions, num_logits)
        early = super().forward(token_ids[:room], positions[:room], num_logits - num_late)
        return torch.cat([early, super().forward(token_ids[room:], positions[room:], num_late)])

    def _take(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> tuple[list[int], list[int]]:
        """The tokens to run, including all cached tokens if their RoPE angles changed."""
        new_ids, at = super()._take(token_ids, positions, num_logits)
        num_cached = len(self.positions)
        was_long = getattr(self._cache, "is_long", num_cached > self._switch)
        is_long = num_cached + len(new_ids) > self._switch
        if num_cached and was_long != is_long:
            new_ids, at = [*self.token_ids, *new_ids], [*self.positions, *at]
            self.reset_to((), ())
        self._cache.is_long = is_long
        return new_ids, at

    def _numbered(self, positions: Sequence[int]) -> Sequence[int]:
        return range(len(self.positions), len(self.positions) + len(positions))

    def _mark_recalled(self, positions: Sequence[int]) -> None:
        raise ValueError(f"position {positions[0]} comes before the cache's next position {self.next_position}")

    def _open_slots(self, window: int | None, num_sinks: int, last_layer: int | None) -> SlotPositions:
        return SlotPositions(range(len(self.positions)), window, num_sinks, last_layer)

    def _call(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: SlotPositions,
        num_logits: int,
        model: PreTrainedModel,
    ) -> torch.Tensor:
        at = slots.positions[-len(token_ids) :]
        if self._is_installed:
            return super()._call(token_ids, at, slots, num_logits, model)
        device = self.model.device
        placed: dict[str, Any] = {"position_ids": torch.tensor([at], device=device)} if self._takes_positions else {}
        if self._takes_logits_to_keep:
            placed["logits_to_keep"] = max(num_logits, 1)
        with nullcontext() if self._switch == sys.maxsize else _angles:
            output = model(
                input_ids=torch.tensor([token_ids], device=device),
                use_cache=True,
                **placed,
                **model_cache.cache_argument(self.model, self._cache),
            )
        return output.logits[0, -num_logits:]  # type: ignore[no-any-return]
