"""Translation between two tokenizers: target tokens to draft tokens, draft logits to target logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from spec_stack.prefill.alignment import overlaps
from spec_stack.tokenizers.pieces import Pieces
from spec_stack.tokenizers.vocabulary import Vocabulary, by_bytes, special_pairs
from spec_stack.types import DraftTokenization


class Translation:
    """The translation of one tokenizer pair; requests share it and only fill its cache of pieces."""

    def __init__(self, target: Any, draft: Any, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._target, self._draft = target, draft
        self._bytes_of = Pieces(target).bytes_of
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
            pieces = self._pieces[target_id] = self._split(self._bytes_of(target_id)) or self._split(b" ") or [0]
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
        """The prompt's text in the draft's tokenization. Ids that differ from the target's own (a generated answer) are
        aligned by bytes. Raises ValueError if that fails too (e.g. an incomplete last character)."""
        skipped = self._leading_bos(prompt_ids)
        # At the start of the text the draft's tokenizer adds its own special tokens.
        text = self._target.decode(prompt_ids[skipped:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        target = self._target(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        target_spans = list(target.offset_mapping)
        if list(target.input_ids) != list(prompt_ids[skipped:]):
            target_spans = self._spans_by_bytes(prompt_ids[skipped:], text)
        draft = self._draft(text, return_offsets_mapping=True, verbose=False)
        draft_ids, spans = list(draft.input_ids), [tuple(span) for span in draft.offset_mapping]
        if draft_ids and draft_ids[-1] == self._draft.eos_token_id and spans[-1][0] == spans[-1][1]:
            del draft_ids[-1], spans[-1]
        if not draft_ids or max(draft_ids) >= self.vocabulary.num_draft:
            raise ValueError(
                "the draft's tokenizer gives no tokens for the prompt, or some that the draft has no row for"
            )
        return DraftTokenization(draft_ids, overlaps([(0, 0)] * skipped + target_spans, spans))

    def _spans_by_bytes(self, target_ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """Half-open character spans that share a byte with each token. Raises ValueError for other bytes."""
        pieces = [self._bytes_of(target_id) for target_id in target_ids]
        if b"".join(pieces) != text.encode():
            raise ValueError("the prompt's tokens are not those that the target's tokenizer gives for their text")
        # The character index of each byte.
        owner = [index for index, character in enumerate(text) for _ in character.encode()]
        stops = list(accumulate(map(len, pieces)))
        return [
            (owner[stop - len(piece)], owner[stop - 1] + 1) if piece else (0, 0)
            for piece, stop in zip(pieces, stops, strict=True)
        ]

    def tokenize_by_token(self, prompt_ids: Sequence[int]) -> DraftTokenization:
        """The prompt translated token by token, split at target token borders."""
        skipped = self._leading_bos(prompt_ids)
        draft_ids = [
            token_id
            for token_id in self._draft("").input_ids
            if token_id != self._draft.eos_token_id and token_id < self.vocabulary.num_draft
        ]
        ranges = [(len(draft_ids), len(draft_ids))] * skipped
        for target_id in prompt_ids[skipped:]:
            start = len(draft_ids)
            draft_ids += self.pieces(target_id)
            ranges.append((start, len(draft_ids)))
        return DraftTokenization(draft_ids, ranges)

    def _leading_bos(self, prompt_ids: Sequence[int]) -> int:
        return int(len(prompt_ids) > 1 and prompt_ids[0] == self._target.bos_token_id)
