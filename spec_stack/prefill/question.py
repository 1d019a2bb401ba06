"""The words of a prompt's question and of its segments. Pure; milliseconds, no draft."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from spec_stack.prefill.queries import question_words
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments

# Tokens with so much weight are the question itself, and are not searched.
_ASKED = 0.5
# Most segments that hold a rare word, and what the largest score by rare words adds to a factor of 1.
_MOST_UNITS, _RARE_WORDS = 6, 2.0
# Ends of a heading beside Markdown's "#": a function's, a key's, a block's.
_HEADING_ENDS = (":", "\uff1a", "{")
# Least share of rare words that names a heading, what its section gets of its score, and the section's most tokens.
_NAMED, _OF_HEADING, _SECTION = 0.5, 0.8, 64
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


def raise_named(worth: torch.Tensor, inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Scores (..., num_segments) of worth (..., num_segments): segments that share rare words with the question count
    up to three times, and text under a heading that does gets most of the heading's score.

    It finds identifiers: a draft attends to all records of a kind alike, and the question names one of them. In code,
    Markdown and settings the name is in the heading, and the value lines below it. Without text, worth itself.
    """
    if inputs.pieces is None:
        return worth
    shares = rare_word_shares(inputs, segments).to(worth)
    scores = worth * (1 + _RARE_WORDS * shares)
    raised = scores.clone()
    for heading, section in _sections(inputs.pieces, segments):
        if shares[heading] >= _NAMED:
            raised[..., section] = raised[..., section].maximum(_OF_HEADING * scores[..., heading, None])
    return raised


def rare_word_shares(inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Rare words in common with the question (num_segments,), fp32, as a share of the segment with most of them.

    Each question word that at most six segments hold gives its weight divided by their number to each of them.
    """
    asked, bodies = question_and_bodies(inputs, segments)
    found = [asked.keys() & body for body in bodies]
    num_with = Counter(word for words in found for word in words)
    shared = [sum(asked[word] / num_with[word] for word in words if num_with[word] <= _MOST_UNITS) for words in found]
    scores = torch.tensor(shared, dtype=torch.float32)
    return scores / scores.max().clamp(min=torch.finfo(scores.dtype).tiny)


def _sections(pieces: Sequence[str], segments: Segments) -> Iterator[tuple[int, slice]]:
    """Each heading with the segments below it that end within _SECTION tokens."""
    stops = segments.borders[1:]
    for at, (start, stop) in enumerate(segments):
        text = "".join(pieces[start:stop]).strip()
        if text.startswith("#") or text.endswith(_HEADING_ENDS):
            yield at, slice(at + 1, bisect_right(stops, stop + _SECTION))


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
