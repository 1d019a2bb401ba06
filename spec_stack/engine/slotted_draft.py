"""A draft that decodes over chosen slots of a long text, so that its steps cost the same at any length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.model import CachedModel
from spec_stack.hf.wrapped import WrappedDraft
from spec_stack.prefill.draft_slots import choose_slots

# Tokens written until the slots are chosen anew, and most tokens that come back then.
_RENEW_EVERY = 32
_MAX_RESTORED = 64


class SlottedDraft(WrappedDraft):
    """Counts in the whole text and holds its sinks, its newest part and chunks that share words with what is written.

    The prompt is known from the beginning; the first forward prefills no more of it than the slots. As the text grows,
    the slots are chosen anew at the beginning of a step: what is no longer chosen is forgotten, what is chosen now is
    prefilled at its own positions, behind the older slots. What a draft proposes is verified, so a bad choice costs
    speed alone.

    Parameters
    ----------
    draft : CachedModel
        Empty, of the target's ids. Owned.
    prompt_ids : sequence of int
        The prompt.
    num_slots : int
        Most slots when they are chosen; the text written since comes on top.
    chunk_size, num_sinks : int
        As in `prefill.draft_slots.choose_slots`.
    """

    _draft: CachedModel

    def __init__(
        self, draft: CachedModel, prompt_ids: Sequence[int], num_slots: int, chunk_size: int, num_sinks: int
    ) -> None:
        super().__init__(draft)
        self._num_slots, self._chunk_size, self._num_sinks = num_slots, chunk_size, num_sinks
        # All tokens before next_position. What the slots can hold of the prompt is left to be fed.
        self._text = list(prompt_ids[: max(0, len(prompt_ids) - num_slots)])
        self._num_when_chosen = 0
        self._begins_step = True

    @property
    def next_position(self) -> int:
        """Where in the text what it has yet to be fed begins. Of what comes before it holds the chosen slots."""
        return len(self._text)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Go on with the text; of a part that is longer than the slots, with the chosen positions of it.

        Raises ValueError for other positions than those from `next_position` on, and for more than one row of logits.
        """
        if num_logits != 1 or list(positions) != list(range(len(self._text), len(self._text) + len(token_ids))):
            raise ValueError("a draft over chosen slots goes on from its next position and gives one row of logits")
        self._text += token_ids
        wanted = list(positions)
        if self._begins_step and len(self._text) >= self._num_when_chosen + _RENEW_EVERY:
            wanted = self._renew()
        self._begins_step = False
        return self._draft.forward([self._text[position] for position in wanted], wanted, num_logits=1)

    def _renew(self) -> list[int]:
        """Choose the slots anew and forget the others; the positions to prefill, earlier ones first."""
        chosen = choose_slots(self._text, self._num_slots, self._chunk_size, self._num_sinks)
        held = {position: slot for slot, position in enumerate(self._draft.positions)}
        first = not self._num_when_chosen
        self._num_when_chosen = len(self._text)
        newest = self._draft.next_position
        if first:
            self._draft.rollback(self._draft.num_cached)
            return chosen
        missing = [position for position in chosen if position not in held]
        restored = [position for position in missing if position < newest][:_MAX_RESTORED]
        wanted = set(chosen)
        self._draft.keep_slots([slot for position, slot in held.items() if position in wanted])
        return [*restored, *(position for position in missing if position >= newest)]

    def rollback(self, num_tokens: int) -> None:
        """Forget the text's last tokens, which were fed since the last step began. Called after every step."""
        self._draft.rollback(num_tokens)
        del self._text[len(self._text) - num_tokens :]
        self._begins_step = True


def draft_beside_dense(pair: ModelPair, request: Request, whole: DraftModel) -> DraftModel | SlottedDraft:
    """The draft for a request whose target takes in the whole prompt: `whole`, or one over chosen slots.

    A prompt not much longer than the slots is kept whole, as is that of a draft which can drop none of it: one with a
    recurrent state, with another tokenizer, or without positions for it.
    """
    prefill = request.prefill
    is_short = len(request.prompt_ids) <= 2 * prefill.draft_slots
    if prefill.prune == "none" or is_short or request.draft_start or pair.translation is not None:
        return whole
    draft = pair.open_index(prefill.prefill_chunk)
    if not draft.can_restore:
        return whole
    return SlottedDraft(
        draft, request.prompt_ids, prefill.draft_slots, prefill.chunk_size, prefill.keep_first * prefill.chunk_size
    )
