"""The words of a prompt's question and of its segments. Pure; milliseconds, no draft."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import torch

from spec_stack.prefill.queries import question_words
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments

# Tokens with so much weight are the question itself, and are not searched.
_ASKED = 0.5
# Most segments that hold a rare word, and what the largest score by rare words adds to a factor of 1.
_MOST_UNITS, _RARE_WORDS = 3, 2.0
# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")


def question_and_bodies(
    inputs: ScoringInputs, segments: Segments
) -> tuple[dict[Hashable, float], list[list[Hashable]]]:
    """The question's words with their weights, and the words of every segment outside the question; without text,
    tokens in place of words.
    """
    asked = question_words(inputs.candidates)
    others = ([at for at in range(*segment) if asked.get(at, 0.0) < _ASKED] for segment in segments)
    bodies = [[word for word, _ in _words_by_token(inputs, tokens)] for tokens in others]
    return _weights(inputs, asked), bodies


def rare_word_factor(inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Factors (num_segments,), fp32, from 1 to 3, by rare words in common with the question; 1 without text.

    Each question word that at most three segments hold gives its weight divided by their number to each of them; the
    segments with the largest sum count three times. It finds identifiers: a draft attends to all records of a kind
    alike, and the question names one of them.
    """
    if inputs.pieces is None:
        return torch.ones(len(segments))
    asked, bodies = question_and_bodies(inputs, segments)
    found = [asked.keys() & body for body in bodies]
    num_with = Counter(word for words in found for word in words)
    shared = [sum(asked[word] / num_with[word] for word in words if num_with[word] <= _MOST_UNITS) for words in found]
    scores = torch.tensor(shared, dtype=torch.float32)
    return 1 + _RARE_WORDS * scores / scores.max().clamp(min=torch.finfo(scores.dtype).tiny)


def _weights(inputs: ScoringInputs, asked: Mapping[int, float]) -> dict[Hashable, float]:
    """The weight of each question word: the maximum over its tokens."""
    weights: dict[Hashable, float] = {}
    for run in _runs(sorted(asked)):
        for word, token in _words_by_token(inputs, run):
            weights[word] = max(weights.get(word, 0.0), asked[token])
    return weights


def _runs(tokens: Sequence[int]) -> list[range]:
    """Increasing tokens as runs without gaps."""
    cuts = [0, *(at for at in range(1, len(tokens)) if tokens[at] != tokens[at - 1] + 1), len(tokens)]
    return [range(tokens[start], tokens[stop - 1] + 1) for start, stop in pairwise(cuts) if start < stop]


def _words_by_token(inputs: ScoringInputs, tokens: Sequence[int]) -> list[tuple[Hashable, int]]:
    """The words of these tokens, each with the token in which it ends."""
    if inputs.pieces is None:
        return [(inputs.prompt_ids[at], at) for at in tokens]
    owner = [at for at in tokens for _ in inputs.pieces[at].lower()]
    text = "".join(inputs.pieces[at] for at in tokens).lower()
    return [(match.group(), owner[match.end() - 1]) for match in _WORD.finditer(text)]
