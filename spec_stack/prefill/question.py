"""The words of a prompt's question and of its units. Pure; milliseconds, no draft."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import torch

from spec_stack.prefill.queries import question_words
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.units import Units

# Tokens with so much weight are the question itself, and are not searched.
_ASKED = 0.5
# Most units that hold a rare word, and what the largest score by rare words adds to a factor of 1.
_MOST_UNITS, _RARE_WORDS = 3, 2.0
# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")


def question_and_bodies(evidence: Evidence, units: Units) -> tuple[dict[Hashable, float], list[list[Hashable]]]:
    """The question's words with their weights, and the words of every unit outside the question; without text, tokens
    in place of words.
    """
    asked = question_words(evidence.candidates)
    others = ([at for at in range(*unit) if asked.get(at, 0.0) < _ASKED] for unit in units)
    bodies = [[word for word, _ in _words_by_token(evidence, tokens)] for tokens in others]
    return _weights(evidence, asked), bodies


def rare_word_factor(evidence: Evidence, units: Units) -> torch.Tensor:
    """Factors (num_units,), fp32, from 1 to 3, by rare words in common with the question; 1 without text.

    Each question word that at most three units hold gives its weight divided by their number to each of them; the
    units with the largest sum count three times. It finds identifiers: a draft attends to all records of a kind alike,
    and the question names one of them.
    """
    if evidence.pieces is None:
        return torch.ones(len(units))
    asked, bodies = question_and_bodies(evidence, units)
    found = [asked.keys() & body for body in bodies]
    num_with = Counter(word for words in found for word in words)
    shared = [sum(asked[word] / num_with[word] for word in words if num_with[word] <= _MOST_UNITS) for words in found]
    scores = torch.tensor(shared, dtype=torch.float32)
    return 1 + _RARE_WORDS * scores / scores.max().clamp(min=torch.finfo(scores.dtype).tiny)


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


def _words_by_token(evidence: Evidence, tokens: Sequence[int]) -> list[tuple[Hashable, int]]:
    """The words of these tokens, each with the token in which it ends."""
    if evidence.pieces is None:
        return [(evidence.prompt_ids[at], at) for at in tokens]
    owner = [at for at in tokens for _ in evidence.pieces[at].lower()]
    text = "".join(evidence.pieces[at] for at in tokens).lower()
    return [(match.group(), owner[match.end() - 1]) for match in _WORD.finditer(text)]
