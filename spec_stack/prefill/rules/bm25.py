"""BM25 over the units of a prompt, for its question: no draft, milliseconds.

Robertson and Zaragoza, https://doi.org/10.1561/1500000019.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.rule import Evidence, SelectionRule
from spec_stack.prefill.rules.attention import with_neighbours
from spec_stack.prefill.units import Units

_K1, _B = 1.5, 0.75
# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")


class ByBM25(SelectionRule):
    """BM25 of each unit before the question, for the question's words; without text, for its tokens.

    Where the question is not told, its words are looked for at the prompt's end, those nearest to it first.
    """

    needs_attention: ClassVar[bool] = False

    def score(self, evidence: Evidence, units: Units, config: PrefillConfig) -> torch.Tensor:
        start, stop = evidence.asked(config)
        asked = _weights(_words_by_token(evidence, start, stop), evidence.half_life(config))
        bodies = [_words(evidence, begin, min(end, start)) if begin < start else [] for begin, end in units]
        return with_neighbours(torch.tensor(bm25(bodies, asked), dtype=torch.float32), config.neighbour_share)


def bm25(bodies: Sequence[Sequence[Hashable]], asked: dict[Hashable, float]) -> list[float]:
    """BM25 of each body of words for words that are asked for, with a weight each; an empty body has 0."""
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


def _weights(words: Sequence[tuple[Hashable, int]], half_life: float) -> dict[Hashable, float]:
    """Return what each word counts, by how many tokens its last occurrence stands before the question's end."""
    return {word: 0.5 ** (distance / half_life) for word, distance in words}


def _words(evidence: Evidence, start: int, stop: int) -> list[Hashable]:
    if evidence.pieces is None:
        return list(evidence.prompt_ids[start:stop])
    return list(_WORD.findall("".join(evidence.pieces[start:stop]).lower()))


def _words_by_token(evidence: Evidence, start: int, stop: int) -> list[tuple[Hashable, int]]:
    """The words of a span in order, each with the number of tokens between it and the end."""
    if evidence.pieces is None:
        return [(evidence.prompt_ids[at], stop - 1 - at) for at in range(start, stop)]
    owner = [at for at in range(start, stop) for _ in evidence.pieces[at].lower()]
    text = "".join(evidence.pieces[start:stop]).lower()
    return [(match.group(), stop - 1 - owner[match.end() - 1]) for match in _WORD.finditer(text)]
