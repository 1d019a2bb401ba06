"""BM25 over the units of a prompt, for its question: no draft, milliseconds.

Robertson and Zaragoza, https://doi.org/10.1561/1500000019.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.queries import question_words
from spec_stack.prefill.rule import Evidence, SelectionRule
from spec_stack.prefill.units import Units

_K1, _B = 1.5, 0.75
# Tokens with so much weight are the question itself, and are not searched.
_ASKED = 0.5
# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")


class ByBM25(SelectionRule):
    """BM25 of each unit for the question's words (`queries.question_words`); without text, for its tokens."""

    needs_attention: ClassVar[bool] = False

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        asked = question_words(evidence.candidates)
        bodies = [_words(evidence, [at for at in range(*unit) if asked.get(at, 0.0) < _ASKED]) for unit in units]
        return torch.tensor(bm25(bodies, _weights(evidence, asked)), dtype=torch.float32)


def bm25(bodies: Sequence[Sequence[Hashable]], asked: dict[Hashable, float]) -> list[float]:
    """BM25 of each body of words for the weighted question words; an empty body has 0."""
    counts = [Counter(body) for body in bodies]
    num_bodies = sum(map(bool, counts))
    average = sum(map(len, bodies)) / max(1, num_bodies)
    num_with = Counter(word for count in counts for word in count.keys() & asked.keys())
    rarity = {
        word: weight * math.log(1 + (num_bodies - num_with[word] + 0.5) / (num_with[word] + 0.5))
        for word, weight in asked.items()
    }
    scores = []
    for body, count in zip(bodies, counts, strict=True):
        damping = _K1 * (1 - _B + _B * len(body) / average) if average else 0.0
        found = count.keys() & asked.keys()
        scores.append(sum(rarity[word] * count[word] * (_K1 + 1) / (count[word] + damping) for word in found))
    return scores


def _weights(evidence: Evidence, asked: Mapping[int, float]) -> dict[Hashable, float]:
    """The weight of each question word: the maximum over its tokens."""
    weights: dict[Hashable, float] = {}
    for run in _runs(sorted(asked)):
        for word, token in _words_by_token(evidence, run):
            weights[word] = max(weights.get(word, 0.0), asked[token])
    return weights


def _runs(tokens: Sequence[int]) -> list[range]:
    """Increasing tokens as runs without gaps."""
    cuts = [0, *(at for at in range(1, len(tokens)) if tokens[at] != tokens[at - 1] + 1), len(tokens)]
    return [range(tokens[start], tokens[stop - 1] + 1) for start, stop in pairwise(cuts) if start < stop]


def _words(evidence: Evidence, tokens: Sequence[int]) -> list[Hashable]:
    if evidence.pieces is None:
        return [evidence.prompt_ids[at] for at in tokens]
    return list(_WORD.findall("".join(evidence.pieces[at] for at in tokens).lower()))


def _words_by_token(evidence: Evidence, tokens: range) -> list[tuple[Hashable, int]]:
    """The words of a run of tokens, each with the token in which it ends."""
    if evidence.pieces is None:
        return [(evidence.prompt_ids[at], at) for at in tokens]
    owner = [at for at in tokens for _ in evidence.pieces[at].lower()]
    text = "".join(evidence.pieces[at] for at in tokens).lower()
    return [(match.group(), owner[match.end() - 1]) for match in _WORD.finditer(text)]
