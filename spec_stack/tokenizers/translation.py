"""Translation between two tokenizers: target tokens to draft tokens, draft logits to target logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from spec_stack.prefill.alignment import overlaps
from spec_stack.tokenizers.vocabulary import Pieces, Vocabulary, by_bytes, special_pairs
from spec_stack.types import DraftTokenization


class Translation:
    """The translation of one tokenizer pair; requests share it and only fill its cache of pieces."""

    def __init__(self, target: Any, draft: Any, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._target, self._bos_id, self._draft = Pieces(target), target.bos_token_id, draft
        self._draft_ids = {
            text: token_id for text, token_id in by_bytes(draft).items() if token_id < vocabulary.num_draft
        }
        self._longest = max(map(len, self._draft_ids), default=0)
        self._pieces = {
            target_id: [draft_id]
            for target_id, draft_id in special_pairs(target, draft).items()
            if draft_id < vocabulary.num_draft
        }
        self._common = torch.tensor([*vocabulary.common.items()], dtype=torch.long).reshape(-1, 2)

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits (n, num_draft) → (n, num_target), -inf for tokens that are not common."""
        self._common = self._common.to(logits.device)
        target_ids, draft_ids = self._common.unbind(1)
        mapped = logits.new_full((logits.shape[0], self.vocabulary.num_target), -torch.inf)
        mapped[:, target_ids] = logits[:, draft_ids]
        return mapped

    def pieces(self, target_id: int) -> list[int]:
        """At least one draft token for a target token, longest match first. An id without text counts as a space."""
        pieces = self._pieces.get(target_id)
        if pieces is None:
            pieces = self._pieces[target_id] = self._split(self._target.bytes_of(target_id)) or self._split(b" ") or [0]
        return pieces

    def _split(self, text: bytes) -> list[int]:
        """Longest-match draft tokens of a text; unmatched bytes are skipped."""
        pieces, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._draft_ids), None)
            if end is not None:
                pieces.append(self._draft_ids[text[start:end]])
            start = end or start + 1
        return pieces

    def tokenize(self, prompt_ids: Sequence[int]) -> DraftTokenization:
        """The prompt's text in the draft's tokenization. Raises ValueError if the draft cannot take it."""
        skipped = int(len(prompt_ids) > 1 and prompt_ids[0] == self._bos_id)
        target_ids = prompt_ids[skipped:]
        texts = self._target.of(target_ids)
        spans: list[tuple[int, int]] = []
        for token_id, stop, text in zip(target_ids, accumulate(map(len, texts)), texts, strict=True):
            # A token that begins a character shares it with the one that ends it.
            is_begun = not text and self._target.bytes_of(token_id)
            spans.append((stop - len(text), stop + 1 if is_begun else stop))
        # At the start of the text the draft's tokenizer adds its own special tokens.
        draft = self._draft("".join(texts), return_offsets_mapping=True, verbose=False)
        draft_ids, draft_spans = list(draft.input_ids), [tuple(span) for span in draft.offset_mapping]
        if draft_ids and draft_ids[-1] == self._draft.eos_token_id and draft_spans[-1][0] == draft_spans[-1][1]:
            del draft_ids[-1], draft_spans[-1]
        if not draft_ids or max(draft_ids) >= self.vocabulary.num_draft:
            raise ValueError("its tokenizer gives no tokens for the prompt, or some that the draft has no row for")
        return DraftTokenization(draft_ids, overlaps([(0, 0)] * skipped + spans, draft_spans))
