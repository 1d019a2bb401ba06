"""BM25 over the segments of a prompt, for its question: no draft, milliseconds.

Robertson and Zaragoza, https://doi.org/10.1561/1500000019.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import ClassVar

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.question import words_of_segments
from spec_stack.prefill.rule import ScoringInputs, SelectionRule
from spec_stack.prefill.segments import Segments

_K1, _B = 1.5, 0.75


class ByBM25(SelectionRule):
    """BM25 of each segment, with the heads kept with it, for the question's words (`queries.question_tokens`); without
    text, for its tokens."""

    needs_attention: ClassVar[bool] = False

    def score(self, inputs: ScoringInputs, segments: Segments, config: PrefillConfig) -> torch.Tensor:
        question = inputs.asked()
        _, with_heads = words_of_segments(inputs, question, segments)
        scores = torch.tensor(bm25(with_heads, question.words), dtype=torch.float32)
        inputs.note_part("words", scores)
        return scores


def bm25(documents: Sequence[Sequence[Hashable]], query: Collection[Hashable]) -> list[float]:
    """BM25 of each document, a list of words, for the query; an empty one has 0."""
    counts = [Counter(document) for document in documents]
    num_documents = sum(map(bool, counts))
    average = sum(map(len, documents)) / max(1, num_documents)
    num_with = Counter(word for count in counts for word in count.keys() & query)
    rarity = {word: math.log(1 + (num_documents - num_with[word] + 0.5) / (num_with[word] + 0.5)) for word in query}
    scores = []
    for document, count in zip(documents, counts, strict=True):
        damping = _K1 * (1 - _B + _B * len(document) / average) if average else 0.0
        found = count.keys() & query
        scores.append(sum(rarity[word] * count[word] * (_K1 + 1) / (count[word] + damping) for word in found))
    return scores
