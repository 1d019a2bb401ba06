"""A draft that sees the end of a text alone, for texts longer than it has positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_stack.hf.model import CachedModel
from spec_stack.hf.wrapped import WrappedDraft
from spec_stack.tokenizers.translated_draft import TranslatedDraft


class TailDraft(WrappedDraft):
    """Counts as if the text before its start had been seen, and has its draft begin at position 0 there.

    What it proposes is worse for what it has not seen; that is all, since the target judges every token.

    Parameters
    ----------
    draft : CachedModel or TranslatedDraft
        Empty, and owned from now on; one with another tokenizer has a tokenization of the text from the start on.
    start : int
        The first token of the text that it is shown.
    """

    _draft: CachedModel | TranslatedDraft

    def __init__(self, draft: CachedModel | TranslatedDraft, start: int) -> None:
        super().__init__(draft)
        self._start = start

    @property
    def next_position(self) -> int:
        """The position in the whole text after that of the last cached token; the start where there is none."""
        return self._start + self._draft.next_position

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """As the draft's, at positions of the whole text."""
        return self._draft.forward(token_ids, self._inner(positions), num_logits)

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """As the draft's, at positions of the whole text."""
        self._draft.prefill(token_ids, self._inner(positions), window, num_sinks, num_layers)

    def prefill_kept(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Forget everything, and prefill those of these tokens of the whole prompt that lie behind the start."""
        behind = [position for position in positions if position >= self._start]
        self._draft.prefill_kept(prompt_ids[self._start :], self._inner(behind))

    def rollback(self, num_tokens: int) -> None:
        """As the draft's."""
        self._draft.rollback(num_tokens)

    def keep_slots(self, slots: Sequence[int]) -> None:
        """As the draft's: slots are counted from the start."""
        self._draft.keep_slots(slots)

    def _inner(self, positions: Sequence[int]) -> list[int]:
        return [position - self._start for position in positions]
