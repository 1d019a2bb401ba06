"""A draft that decodes over chosen slots of a long text, so that its steps cost the same at any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.model import CachedModel
from spec_stack.hf.wrapped import WrappedDraft
from spec_stack.prefill.draft_slots import MOST_RESTORED, RENEW_EVERY, RENEW_WHERE_WRONG, choose_slots


class SlottedDraft(WrappedDraft):
    """Counts in the whole text and holds its sinks, its newest part and chunks that share words with what is written.

    The prompt is known from the beginning; the first forward prefills no more of it than the slots. As the text grows,
    the slots are chosen anew at the beginning of a step, soon where half of the last proposal or more was wrong: what
    is no longer chosen is forgotten, what is chosen now is prefilled at its own positions, behind the older slots. What
    a draft proposes is verified, so a bad choice costs speed alone.

    Parameters
    ----------
    draft : CachedModel
        Empty, of the target's ids. Owned.
    prompt_ids : sequence of int
        The prompt.
    num_slots : int
        Most slots when they are chosen; the text written since comes on top.
    choose : callable
        Gives so many positions of a text, as `prefill.draft_slots.choose_slots` does.
    renew_every : (int, int)
        Tokens written until they are chosen anew, while the draft is right and where it is wrong.
    max_restored : int
        Most tokens that come back then.
    """

    _draft: CachedModel

    def __init__(
        self,
        draft: CachedModel,
        prompt_ids: Sequence[int],
        num_slots: int,
        choose: Callable[[Sequence[int], int], list[int]],
        renew_every: tuple[int, int] = (RENEW_EVERY, RENEW_WHERE_WRONG),
        max_restored: int = MOST_RESTORED,
    ) -> None:
        super().__init__(draft)
        self._num_slots, self._choose = num_slots, choose
        self._renew_every, self._max_restored = renew_every, max_restored
        # All tokens before next_position. What the slots can hold of the prompt is left to be fed.
        self._text = list(prompt_ids[: max(0, len(prompt_ids) - num_slots)])
        self._num_when_chosen = 0
        self._begins_step = True
        # Of the last step that drafted: whether it was mostly wrong, and the drafted tokens fed in it.
        self._is_wrong = False
        self._num_drafted = 0

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
        if self._begins_step:
            due = self._num_when_chosen + self._renew_every[self._is_wrong]
            if not self._num_when_chosen or len(self._text) >= due:
                wanted = self._renew()
            self._begins_step, self._num_drafted = False, 0
        else:
            self._num_drafted += len(token_ids)
        return self._draft.forward([self._text[position] for position in wanted], wanted, num_logits=1)

    def _renew(self) -> list[int]:
        """Choose the slots anew and forget the others; the positions to prefill, earlier ones first."""
        chosen = self._choose(self._text, self._num_slots)
        held = {position: slot for slot, position in enumerate(self._draft.positions)}
        first = not self._num_when_chosen
        self._num_when_chosen = len(self._text)
        newest = self._draft.next_position
        if first:
            self._draft.rollback(self._draft.num_cached)
            return chosen
        missing = [position for position in chosen if position not in held]
        restored = [position for position in missing if position < newest][: self._max_restored]
        wanted = set(chosen)
        self._draft.keep_slots([slot for position, slot in held.items() if position in wanted])
        return [*restored, *(position for position in missing if position >= newest)]

    def rollback(self, num_tokens: int) -> None:
        """Forget the text's last tokens, which were fed since the last step began. Called after every step."""
        self._draft.rollback(num_tokens)
        del self._text[len(self._text) - num_tokens :]
        if self._num_drafted:
            self._is_wrong = 2 * num_tokens >= self._num_drafted
        self._begins_step, self._num_drafted = True, 0


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
    num_sinks = prefill.keep_first * prefill.chunk_size
    choose = partial(choose_slots, chunk_size=prefill.chunk_size, num_sinks=num_sinks)
    return SlottedDraft(draft, request.prompt_ids, prefill.draft_slots, choose)
