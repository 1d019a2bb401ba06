"""Words that a question and a text have in common, scored by segment: no draft, milliseconds. For recall in
sessions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from spec_stack.prefill.alignment import Span
from spec_stack.prefill.queries import Candidates
from spec_stack.prefill.segments import Segments

# Lengths of the n-grams, and their most occurrences in the body.
_ORDERS = (2, 1)
_MAX_OCCURRENCES = 4
# Where no segment has a question mark: tokens at the end of the new text that are its question, the half-life of a
# word's weight, and those whose pairs count.
_MOST_WORDS, _HALF_LIFE, _MOST_PAIRED = 96, 12, 32
# Most tokens between the words of a pair; a word that occurs more than once in so many segments is too common.
_NEAR = 8
_COMMON_SHARE = 4


def shared_words(prompt_ids: Sequence[int], segments: Segments, found: Candidates) -> torch.Tensor:
    """Scores (num_segments,): words of every old segment in common with the new text's question.

    Where no segment of the new text has a question mark, its end is the question.
    """
    num_tokens, num_old = len(prompt_ids), segments.num_tokens
    marked = [
        (max(start, num_old), stop)
        for (start, stop), mark in zip(found.segments, found.is_question, strict=True)
        if mark and stop > num_old
    ]
    if marked:
        scores = [rare_words(prompt_ids, span, segments) for span in marked]
        scores += [pair_scores(prompt_ids, span, segments) for span in marked]
    else:
        start = max(num_old, num_tokens - _MOST_WORDS)
        half_life = math.inf if start == num_old else _HALF_LIFE
        scores = [rare_words(prompt_ids, (start, num_tokens), segments, half_life)]
        scores += [pair_scores(prompt_ids, (max(num_old, num_tokens - _MOST_PAIRED), num_tokens), segments)]
    return torch.stack(scores).amax(dim=0)


def pair_scores(prompt_ids: Sequence[int], question: Span, segments: Segments) -> torch.Tensor:
    """Scores (num_segments,): pairs of question words, in any order, that stand together in a segment.

    Two different question tokens within _NEAR tokens of each other, at most _MAX_OCCURRENCES times in the text, give 1
    divided by that count to each segment that the place touches. Common tokens do not count.
    """
    words = set(prompt_ids[slice(*question)])
    named = [(at, token) for at, token in enumerate(prompt_ids[: segments.num_tokens]) if token in words]
    times = Counter(token for _, token in named)
    most = max(_MAX_OCCURRENCES, len(segments) // _COMMON_SHARE)
    named = [(at, token) for at, token in named if times[token] <= most]
    places: dict[frozenset[int], list[Span]] = defaultdict(list)
    for index, (first, one) in enumerate(named):
        for last, other in named[index + 1 : index + 1 + _NEAR]:
            if last - first <= _NEAR and one != other:
                places[frozenset((one, other))].append((first, last))
    return _votes(segments, ((found, 1.0) for found in places.values()))


def rare_words(
    prompt_ids: Sequence[int], question: Span, segments: Segments, half_life: float = math.inf
) -> torch.Tensor:
    """Scores (num_segments,): rare n-grams in common with the question, after PFlash.

    Every n-gram of the question with at most _MAX_OCCURRENCES in the text before it gives n divided by that count to
    each segment that an occurrence touches. half_life: of an n-gram's weight, in tokens to the question's end.
    """
    body, asked = prompt_ids[: question[0]], prompt_ids[slice(*question)]
    votes: list[tuple[list[Span], float]] = []
    for order in _ORDERS:
        grams = list(_ngrams(asked, order))
        # The occurrence nearest to the end counts.
        weights = {gram: 0.5 ** ((len(grams) - 1 - at) / half_life) for at, gram in enumerate(grams)}
        places: dict[tuple[int, ...], list[Span]] = defaultdict(list)
        for at, gram in enumerate(_ngrams(body, order)):
            if gram in weights:
                places[gram].append((at, at + order - 1))
        votes += [(found, order * weights[gram]) for gram, found in places.items()]
    return _votes(segments, votes)


def _ngrams(token_ids: Sequence[int], order: int) -> Iterable[tuple[int, ...]]:
    return zip(*(token_ids[start:] for start in range(order)), strict=False)


def _votes(segments: Segments, votes: Iterable[tuple[Sequence[Span], float]]) -> torch.Tensor:
    """Scores (num_segments,) of texts that occur rarely: the weight divided by the number of places, to each segment
    of a place's first and last token. Places behind the last segment get none."""
    scores = [0.0] * len(segments)
    for places, weight in votes:
        if len(places) > _MAX_OCCURRENCES:
            continue
        for first, last in places:
            for segment in {bisect_right(segments.borders, at) - 1 for at in (first, last) if at < segments.num_tokens}:
                scores[segment] += weight / len(places)
    return torch.tensor(scores)
