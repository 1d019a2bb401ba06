"""A draft with another tokenizer: target ids in, logits over target ids out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from spec_stack.hf.attention import LayerCapture
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.tokenizers.translation import Translation
from spec_stack.types import DraftTokenization


class TranslatedDraft:
    """Counts in target tokens and feeds its draft's own: the prompt in the draft's tokenization, each later token in
    its own pieces, so that rollbacks never split one. Prompt "hello", target `hell|o`, draft `he|llo`: `_ends` is
    [1, 2]; a generated `world`, draft `wor|ld`, makes it [1, 2, 4]."""

    def __init__(self, draft: CachedModel, translation: Translation, tokenization: DraftTokenization) -> None:
        self._draft = draft
        self._translation = translation
        self._tokenization = tokenization
        # The draft's next position after each target token.
        self._ends: list[int] = []
        if draft.num_cached:
            self._go_on()

    def _go_on(self) -> None:
        """Roll back to the last prompt token up to which the draft's cached tokens match."""
        num_matching = num_shared(self._draft.token_ids, self._tokenization.token_ids)
        # The last target token must yield logits.
        ends = [self._prompt_end(position) for position in range(len(self._tokenization.ranges) - 1)]
        self._ends = ends[: bisect_right(ends, num_matching)]
        self._draft.truncate(self._ends[-1] if self._ends else 0)

    @property
    def next_position(self) -> int:
        """Target tokens fed so far."""
        return len(self._ends)

    @property
    def num_cached(self) -> int:
        """The draft's own cached tokens."""
        return self._draft.num_cached

    @property
    def num_layers(self) -> int:
        return self._draft.num_layers

    @property
    def is_stateful(self) -> bool:
        return self._draft.is_stateful

    @property
    def on_piece(self) -> Callable[[int, float], None] | None:
        """Progress in the draft's own tokens."""
        return self._draft.on_piece

    @on_piece.setter
    def on_piece(self, tell: Callable[[int, float], None] | None) -> None:
        self._draft.on_piece = tell

    def draft_lag(self, num_tokens: int) -> int:
        """Target tokens to feed, and the draft's own that it has to run again."""
        return num_tokens - self.next_position + self._draft.draft_lag(self._draft.next_position)

    def capture(self, first: int = 0) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Queries and keys of the draft's own tokens, at its own positions."""
        return self._draft.capture(first)

    def checkpoint(self) -> None:
        self._draft.checkpoint()

    def release(self) -> None:
        self._draft.release()

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Feed target tokens at the next positions; logits (1, num_target) after the last one."""
        if num_logits != 1:
            raise ValueError("a draft with another tokenizer goes on and gives one row of logits")
        fed, ends = self._fed(token_ids, positions)
        if not fed:
            raise ValueError("no token of the draft ends within these tokens of the target")
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
        """As `forward` without logits; a draft token that ends in a later part waits for it. Window, sinks and layers
        as in `CachedModel.prefill`, in draft tokens."""
        fed, ends = self._fed(token_ids, positions)
        first = self._draft.next_position
        if fed:
            self._draft.prefill(fed, range(first, first + len(fed)), window, num_sinks, num_layers)
        self._ends += ends

    def _fed(self, token_ids: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """The draft tokens of these target tokens, and its next position after each."""
        start, num_prompt = self.next_position, len(self._tokenization.ranges)
        if list(positions) != list(range(start, start + len(token_ids))):
            raise ValueError("a draft with another tokenizer goes on from its next position")
        first = self._draft.next_position
        ends = [self._prompt_end(position) for position in range(start, min(start + len(token_ids), num_prompt))]
        fed = list(self._tokenization.token_ids[first : ends[-1]]) if ends else []
        for target_id in token_ids[max(0, num_prompt - start) :]:
            fed += self._translation.pieces(target_id)
            ends.append(first + len(fed))
        return fed, ends

    def _prompt_end(self, position: int) -> int:
        """The prompt's draft tokens that end before the target token behind this position begins."""
        ranges, num_draft_tokens = self._tokenization.ranges, len(self._tokenization.token_ids)
        if position + 1 == len(ranges):
            return num_draft_tokens
        # The last draft token waits for the last target token, which must yield logits.
        return min(ranges[position + 1][0], num_draft_tokens - 1)

    def rollback(self, num_tokens: int) -> None:
        """Drop the last num_tokens target tokens; none of the prompt's after `keep_slots`."""
        if not 0 <= num_tokens <= len(self._ends):
            raise ValueError(f"cannot roll back {num_tokens} of {len(self._ends)} tokens")
        del self._ends[len(self._ends) - num_tokens :]
        self._draft.rollback(self._draft.next_position - (self._ends[-1] if self._ends else 0))

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep the draft slots of these increasing target tokens, and its leading special tokens."""
        self._draft.keep_slots(self._draft_slots(slots))

    def reset_to(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Reset the cache to the draft tokens of these prompt tokens."""
        self._ends = [self._prompt_end(position) for position in range(positions[-1] + 1)] if positions else []
        # A draft token shared with the next target token waits for that one.
        end = self._ends[-1] if positions else 0
        self._draft.reset_to(self._tokenization.token_ids, [at for at in self._draft_slots(positions) if at < end])

    def _draft_slots(self, slots: Sequence[int]) -> list[int]:
        """Draft slots of target tokens, and those before the first target token."""
        ranges = self._tokenization.ranges
        kept = set(range(ranges[0][0]))
        for slot in slots:
            is_prompt = slot < len(ranges)
            kept.update(range(*ranges[slot]) if is_prompt else range(self._ends[slot - 1], self._ends[slot]))
        return sorted(kept)
