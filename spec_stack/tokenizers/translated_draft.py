"""A draft with another tokenizer, as both phases see it: target ids in, logits over target ids out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from spec_stack.hf.attention import LayerCapture
from spec_stack.hf.model import CachedModel
from spec_stack.tokenizers.translation import Translation
from spec_stack.types import Reading


class TranslatedDraft:
    """Counts in target tokens, feeds its draft (which it owns) the draft's own.

    The prompt is fed as its Reading has it, every later token by itself as its pieces: borders of target tokens are
    borders of draft tokens from there on, so a rollback never has to split one. next_position counts the target
    tokens read; num_cached counts the draft's own slots.
    """

    def __init__(self, draft: CachedModel, translation: Translation, reading: Reading) -> None:
        self._draft = draft
        self._translation = translation
        self._reading = reading
        # The draft's next position after every target token read so far.
        self._ends: list[int] = []

    @property
    def num_cached(self) -> int:
        return self._draft.num_cached

    @property
    def next_position(self) -> int:
        return len(self._ends)

    @property
    def forward_s(self) -> float:
        return self._draft.forward_s

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Read target tokens at the next positions; logits (1, num_target) after the last one.

        The prompt's part of token_ids is taken from the reading. Raises ValueError for other positions, for more
        than one row of logits, or where no draft token ends within these tokens.
        """
        if num_logits != 1:
            raise ValueError("a draft with another tokenizer reads on and gives one row of logits")
        fed, ends = self._fed(token_ids, positions)
        first = self._draft.next_position
        logits = self._draft.forward(fed, range(first, first + len(fed)), num_logits=1)
        self._ends += ends
        return self._translation.to_target(logits)

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """The same without logits; window, sinks and layers as in `CachedModel.prefill`, in the draft's own tokens."""
        fed, ends = self._fed(token_ids, positions)
        first = self._draft.next_position
        self._draft.prefill(fed, range(first, first + len(fed)), window, num_sinks, num_layers)
        self._ends += ends

    def _fed(self, token_ids: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """The draft's tokens for these of the target, and its next position after each of them."""
        start, num_prompt = self.next_position, len(self._reading.ranges)
        if list(positions) != list(range(start, start + len(token_ids))):
            raise ValueError("a draft with another tokenizer reads on from its next position")
        ends = [self._end(position) for position in range(start, min(start + len(token_ids), num_prompt))]
        first = self._draft.next_position
        fed = list(self._reading.token_ids[first : ends[-1]]) if ends else []
        for target_id in token_ids[max(0, num_prompt - start) :]:
            fed += self._translation.pieces(target_id)
            ends.append(first + len(fed))
        if not fed:
            raise ValueError("no token of the draft ends within these tokens of the target")
        return fed, ends

    def _end(self, position: int) -> int:
        """The draft tokens of the prompt that are read with its target token at position: all before the next one's."""
        ranges, num_read = self._reading.ranges, len(self._reading.token_ids)
        # The last draft token waits for the last target token, which has to bring logits.
        return num_read if position + 1 == len(ranges) else min(ranges[position + 1][0], num_read - 1)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens target tokens, none of the prompt's once slots of it were dropped."""
        if not 0 <= num_tokens <= len(self._ends):
            raise ValueError(f"cannot roll back {num_tokens} of {len(self._ends)} tokens")
        del self._ends[len(self._ends) - num_tokens :]
        self._draft.rollback(self._draft.next_position - (self._ends[-1] if self._ends else 0))

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep the draft's slots for these target tokens, given in increasing order, and those for no target token
        before them (the draft's own beginning of a text)."""
        self._draft.keep_slots(self._draft_slots(slots))

    def prefill_kept(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Forget everything, and prefill the draft's tokens of these target tokens of the prompt alone."""
        self._ends = [self._end(position) for position in range(positions[-1] + 1)] if positions else []
        # A draft token that the last of them shares with the token after it waits for that one.
        end = self._ends[-1] if positions else 0
        self._draft.prefill_kept(self._reading.token_ids, [at for at in self._draft_slots(positions) if at < end])

    def _draft_slots(self, slots: Sequence[int]) -> list[int]:
        """The draft's slots, counted from the beginning of the text, that hold something of these target tokens."""
        ranges, num_prompt = self._reading.ranges, len(self._reading.ranges)
        kept = set(range(ranges[0][0]))
        for slot in slots:
            later = slot >= num_prompt
            kept.update(range(self._ends[slot - 1], self._ends[slot]) if later else range(*ranges[slot]))
        return sorted(kept)

    def capture(self) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture the draft's queries and keys, in its own tokens."""
        return self._draft.capture()
