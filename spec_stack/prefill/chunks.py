"""Which chunks of the prompt matter: the votes on them, and how they are put together. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spec_stack.config import PrefillConfig

# Lengths of the n-grams; one that occurs more often than this in the body tells too little.
_ORDERS = (2, 1)
_MAX_OCCURRENCES = 4
# Where nobody says where the question begins: the tokens towards the end over which an n-gram's weight doubles.
_HALF_LIFE = 12
# Words of a question that stand so near to each other belong together; a word that occurs more than once in so many
# chunks tells too little.
_NEAR = 8
_COMMON_SHARE = 4
# Under the attention of any chunk that is seen at all, so that its logarithm stays finite.
_LEAST_ATTENTION = 1e-12


@dataclass(frozen=True)
class Evidence:
    """What there is to score a prompt by.

    Attributes
    ----------
    prompt_ids
        The prompt in the target's tokens.
    importance
        (num_prompt_tokens,) from the draft's attention, or None where no draft was asked.
    question
        Half-open span of the tokens that say what is wanted, or that end with it; None where nobody told.
    """

    prompt_ids: Sequence[int]
    importance: torch.Tensor | None = None
    question: tuple[int, int] | None = None


def by_attention(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): the mean importance of a chunk, and no less than a share of its better neighbour's.

    SpecPrefill, https://arxiv.org/abs/2502.02789, section 3.2.3; the neighbours are ours.
    """
    if evidence.importance is None:
        raise ValueError("the draft's attention is missing")
    return with_neighbours(chunk_means(evidence.importance, config.chunk_size), config.neighbour_share)


def by_anchors(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): rare n-grams that the question shares with the chunk."""
    start, stop = evidence.question or (0, len(evidence.prompt_ids))
    # A longer span is a question with its document before it.
    is_whole = evidence.question is not None and stop - start <= config.anchor_tail
    asked = max(start, stop - config.anchor_tail), stop
    half_life = math.inf if is_whole else _HALF_LIFE
    scores = anchor_scores(evidence.prompt_ids, asked, config.chunk_size, half_life)
    return with_neighbours(scores, config.neighbour_share)


def by_both(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): attention and anchors together."""
    return fuse(by_anchors(evidence, config), by_attention(evidence, config), config.anchor_weight)


ChunkScorer = Callable[[Evidence, PrefillConfig], torch.Tensor]
SCORERS: dict[str, ChunkScorer] = {"attention": by_attention, "anchors": by_anchors, "fused": by_both}
# Those that do without the draft's attention.
DRAFT_FREE = frozenset({"anchors"})


def chunk_means(importance: torch.Tensor, size: int) -> torch.Tensor:
    """Mean importance per chunk, (ceil(num_tokens / size),); the tokens that the last chunk lacks count as 0."""
    num_chunks = math.ceil(importance.shape[0] / size)
    padded = torch.nn.functional.pad(importance, (0, num_chunks * size - importance.shape[0]))
    return padded.reshape(num_chunks, size).mean(dim=1)


def with_neighbours(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Scores (num_chunks,), each at least `share` of its better neighbour's."""
    if not share or len(scores) < 2:
        return scores
    left, right = torch.cat([scores[:1], scores[:-1]]), torch.cat([scores[1:], scores[-1:]])
    return torch.maximum(scores, share * torch.maximum(left, right))


def anchor_scores(
    prompt_ids: Sequence[int], question: tuple[int, int], size: int, half_life: float = math.inf
) -> torch.Tensor:
    """How much each chunk shares with the question, counted in rare n-grams. No model; milliseconds.

    Every n-gram (n is 1 or 2) of the question that occurs at most 4 times in the body gives n, divided by the number
    of times it occurs there, to each chunk that an occurrence touches.

    Parameters
    ----------
    prompt_ids
        The prompt.
    question
        Half-open span of the question in it; the body is what comes before.
    size
        Tokens per chunk.
    half_life
        An n-gram's weight halves with every so many tokens from its end to the question's, for a span that may hold
        more than the question.

    Returns
    -------
    torch.Tensor
        (ceil(num_tokens / size),), 0 where nothing is shared.

    Notes
    -----
    The idea is PFlash's: chunks are anchored by words that they share with the end of the prompt. The short n-grams
    and the half-life are ours, chosen on the wordings of `prefill.needles`.
    """
    ids = torch.as_tensor(prompt_ids)
    scores = torch.zeros(math.ceil(len(ids) / size), dtype=torch.float64)
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
        first, last = starts // size, (starts + order - 1) // size
        scores.index_add_(0, first, votes)
        scores.index_add_(0, last[last > first], votes[last > first])
    return scores.float()


def pair_scores(body_ids: Sequence[int], question_ids: Sequence[int], size: int) -> torch.Tensor:
    """How much each chunk of a text has of a question's words side by side, in any order. No model.

    Two different tokens of the question that stand within 8 tokens of each other at most 4 times in the text give 1,
    divided by the number of times, to each chunk that such a place touches. So a line is found that shares several
    words with the question, each of which is common by itself. A token that occurs more than 4 times, and more than
    once in four chunks, does not count.

    Parameters
    ----------
    body_ids
        The text.
    question_ids
        The question; short, since every two of its tokens make a pair.
    size
        Tokens per chunk.

    Returns
    -------
    torch.Tensor
        (ceil(len(body_ids) / size),), 0 where no two tokens meet.
    """
    body, words = torch.as_tensor(body_ids), torch.unique(torch.as_tensor(question_ids))
    num_chunks = math.ceil(len(body) / size)
    scores = torch.zeros(num_chunks, dtype=torch.float64)
    if len(words) < 2 or not num_chunks:
        return scores.float()
    found = torch.searchsorted(words, body).clamp(max=len(words) - 1)
    is_word = words[found] == body
    times = torch.bincount(found[is_word], minlength=len(words))
    is_rare = times <= max(_MAX_OCCURRENCES, num_chunks // _COMMON_SHARE)
    places = torch.nonzero(is_word & is_rare[found])[:, 0]
    named = found[places]
    firsts, lasts, pairs = [], [], []
    for step in range(1, min(_NEAR, len(places) - 1) + 1):
        meet = (places[step:] - places[:-step] <= _NEAR) & (named[step:] != named[:-step])
        one, other = named[:-step][meet], named[step:][meet]
        firsts.append(places[:-step][meet] // size)
        lasts.append(places[step:][meet] // size)
        pairs.append(torch.minimum(one, other) * len(words) + torch.maximum(one, other))
    if not firsts:
        return scores.float()
    first, last = torch.cat(firsts), torch.cat(lasts)
    _, which, counts = torch.unique(torch.cat(pairs), return_inverse=True, return_counts=True)
    is_told = counts[which] <= _MAX_OCCURRENCES
    first, last, votes = first[is_told], last[is_told], 1.0 / counts[which][is_told].double()
    scores.index_add_(0, first, votes)
    scores.index_add_(0, last[last > first], votes[last > first])
    return scores.float()


def fuse(anchors: torch.Tensor, attention: torch.Tensor, weight: float) -> torch.Tensor:
    """The logarithm of the attention (num_chunks,), and `weight` times the anchors on top of it.

    Each shared n-gram multiplies a chunk's attention, as independent evidence multiplies odds: a rare one decides, and
    where the question shares nothing that is rare, the order is the attention's own.
    """
    return attention.clamp(min=_LEAST_ATTENTION).log() + weight * anchors
