"""Words that a question and a text have in common, scored by segment: no draft, milliseconds. For recall in
sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    ids, num_segments = torch.as_tensor(prompt_ids), len(segments)
    body, words = ids[: segments.num_tokens], torch.unique(ids[slice(*question)])
    scores = torch.zeros(num_segments, dtype=torch.float64)
    if len(words) < 2 or not num_segments:
        return scores.float()
    found = torch.searchsorted(words, body).clamp(max=len(words) - 1)
    is_word = words[found] == body
    times = torch.bincount(found[is_word], minlength=len(words))
    is_rare = times <= max(_MAX_OCCURRENCES, num_segments // _COMMON_SHARE)
    places = torch.nonzero(is_word & is_rare[found])[:, 0]
    named = found[places]
    firsts, lasts, pairs = [], [], []
    for step in range(1, min(_NEAR, len(places) - 1) + 1):
        meet = (places[step:] - places[:-step] <= _NEAR) & (named[step:] != named[:-step])
        one, other = named[:-step][meet], named[step:][meet]
        firsts.append(places[:-step][meet])
        lasts.append(places[step:][meet])
        pairs.append(torch.minimum(one, other) * len(words) + torch.maximum(one, other))
    if not firsts:
        return scores.float()
    first, last = torch.cat(firsts), torch.cat(lasts)
    _, which, counts = torch.unique(torch.cat(pairs), return_inverse=True, return_counts=True)
    is_told = counts[which] <= _MAX_OCCURRENCES
    first, last, votes = first[is_told], last[is_told], 1.0 / counts[which][is_told].double()
    _add_votes(scores, segments, first, last, votes)
    return scores.float()


def rare_words(
    prompt_ids: Sequence[int], question: Span, segments: Segments, half_life: float = math.inf
) -> torch.Tensor:
    """Scores (num_segments,): rare n-grams in common with the question, after PFlash.

    Every n-gram of the question with at most _MAX_OCCURRENCES in the text before it gives n divided by that count to
    each segment that an occurrence touches. half_life: of an n-gram's weight, in tokens to the question's end.
    """
    ids = torch.as_tensor(prompt_ids)
    scores = torch.zeros(len(segments), dtype=torch.float64)
    body, asked = ids[: question[0]], ids[question[0] : question[1]]
    if not len(asked):
        return scores.float()
    # The question's tokens by small numbers, so that an n-gram fits one integer; 0 is every other token.
    words = torch.unique(asked)

    def numbered(tokens: torch.Tensor) -> torch.Tensor:
        at = torch.searchsorted(words, tokens).clamp(max=len(words) - 1)
        return torch.where(words[at] == tokens, at + 1, 0)

    body, asked = numbered(body), numbered(asked)
    for order in _ORDERS:
        if len(body) < order or len(asked) < order:
            continue
        radix = (len(words) + 1) ** torch.arange(order)
        grams, owner = torch.unique((asked.unfold(0, order, 1) * radix).sum(dim=1), return_inverse=True)
        distance = torch.arange(len(owner) - 1, -1, -1, dtype=torch.float64)
        # The occurrence nearest to the end counts.
        weights = torch.zeros(len(grams), dtype=torch.float64)
        weights.scatter_reduce_(0, owner, 0.5 ** (distance / half_life), reduce="amax")
        windows = body.unfold(0, order, 1)
        starts = torch.nonzero((windows > 0).all(dim=1))[:, 0]
        codes = (windows[starts] * radix).sum(dim=1)
        found = torch.searchsorted(grams, codes).clamp(max=len(grams) - 1)
        shared = grams[found] == codes
        starts, found = starts[shared], found[shared]
        times = torch.bincount(found, minlength=len(grams))[found]
        rare = times <= _MAX_OCCURRENCES
        starts, votes = starts[rare], order * weights[found[rare]] / times[rare]
        _add_votes(scores, segments, starts, starts + order - 1, votes)
    return scores.float()


def _add_votes(
    scores: torch.Tensor, segments: Segments, starts: torch.Tensor, lasts: torch.Tensor, votes: torch.Tensor
) -> None:
    """Add votes (n,) to the segments of the first and last token of each place (n,); scores (num_segments,) change in
    place.

    A segment gets a vote once; places behind the last segment get none.
    """
    owner = torch.cat([segments.owner, torch.full((1,), len(segments))])
    first, last = (owner[at.clamp(max=segments.num_tokens)] for at in (starts, lasts))
    for segment, counts in ((first, first < len(segments)), (last, (last > first) & (last < len(segments)))):
        scores.index_add_(0, segment[counts], votes[counts])
