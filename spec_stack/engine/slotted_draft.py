"""A draft that decodes over chosen slots of a long text, so that its steps cost the same at any length."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch

from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.draft_kv_budget import DraftKVBudget


class SlottedDraft:
    """Holds a text's sinks, its newest part, and chunks that share words with that part, at their own positions.

    Slots are chosen anew at the beginning of a step, sooner where at least half of the last proposal was rejected.
    Chunks that are no longer chosen are dropped; new ones are prefilled behind the older slots.
    """

    # Each drafted token is seen before the next.
    run_ahead = None

    def __init__(self, draft: CachedModel, budget: DraftKVBudget) -> None:
        self._draft, self._budget = draft, budget
        # All tokens before next_position.
        self._text = list(draft.token_ids)
        self._begins_step = True
        # Of the last step that drafted: whether it was mostly wrong, the drafted tokens fed in it, its last logits.
        self._is_wrong = False
        self._num_drafted = 0
        self._unjudged: torch.Tensor | None = None

    @property
    def num_cached(self) -> int:
        """The chosen slots."""
        return self._draft.num_cached

    def release(self) -> None:
        self._draft.release()

    @property
    def next_position(self) -> int:
        """The text position of the next token to feed; the chosen slots of the text before it are held."""
        return len(self._text)

    def draft_lag(self, num_tokens: int) -> int:
        """Tokens to feed before drafting: of a long gap only the chosen ones."""
        return min(num_tokens - len(self._text), self._budget.num_slots)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Feed the text's next tokens; of a part longer than the slots, its chosen positions. One row of logits."""
        if num_logits != 1 or list(positions) != list(range(len(self._text), len(self._text) + len(token_ids))):
            raise ValueError("a draft over chosen slots goes on from its next position and gives one row of logits")
        wanted = list(positions)
        self._text += token_ids
        if self._begins_step:
            if self._unjudged is not None:
                # The drafted token was never fed, so the token now in its place tells whether it was right.
                self._is_wrong = int(self._unjudged.argmax()) != token_ids[0]
            if self._is_due(len(token_ids)):
                wanted = self._renew()
            self._begins_step, self._num_drafted = False, 0
        else:
            self._num_drafted += len(token_ids)
        logits = self._draft.forward([self._text[position] for position in wanted], wanted, num_logits=1)
        self._unjudged = logits[0]
        return logits

    def _is_due(self, num_new: int) -> bool:
        is_first = not self._budget.num_known
        return is_first or num_new > self._budget.num_slots or self._budget.is_due(len(self._text), self._is_wrong)

    def _renew(self) -> list[int]:
        """Choose the slots anew and drop the others; the positions to prefill, in order."""
        held = np.array(self._draft.positions, dtype=np.int64)
        stays, missing = self._budget.renew(self._text, held, self._draft.next_position)
        self._draft.keep_slots(np.flatnonzero(stays).tolist())
        positions: list[int] = missing.tolist()
        return positions

    def rollback(self, num_tokens: int) -> None:
        """Drop the text's last tokens, which were fed since the last step began. Called after every step."""
        self._draft.rollback(num_tokens)
        del self._text[len(self._text) - num_tokens :]
        if self._num_drafted:
            self._is_wrong, self._unjudged = 2 * num_tokens >= self._num_drafted, None
        self._begins_step, self._num_drafted = True, 0

    def go_back(self, prompt_ids: Sequence[int]) -> None:
        """Go on with another prompt from the common prefix. Its slots are chosen in its first step."""
        shared = min(num_shared(self._text, prompt_ids), len(prompt_ids) - 1)
        self._draft.truncate(shared)
        del self._text[shared:]
        self._budget.num_known = 0
        self._unjudged, self._is_wrong = None, False

    def fork(self) -> SlottedDraft:
        """An independent copy."""
        other = SlottedDraft(self._draft.fork(), copy(self._budget))
        other._text = list(self._text)
        return other
