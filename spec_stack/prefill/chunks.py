"""Which chunks of the prompt matter: the votes on them, and how they are put together. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spec_stack.config import PrefillConfig

# Longest n-grams first; a gram that occurs more often than this in the body tells too little.
_ORDERS = (4, 3, 2)
_MAX_OCCURRENCES = 8
# Of reciprocal rank fusion: how much the first ranks stand out.
_RANK_OFFSET = 10


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
        Half-open span of the tokens that say what is wanted.
    """

    prompt_ids: Sequence[int]
    importance: torch.Tensor | None
    question: tuple[int, int]


def by_attention(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): the mean importance of a chunk, and no less than a share of its better neighbour's.

    SpecPrefill, https://arxiv.org/abs/2502.02789, section 3.2.3; the neighbours are ours.
    """
    if evidence.importance is None:
        raise ValueError("the draft's attention is missing")
    return with_neighbours(chunk_means(evidence.importance, config.chunk_size), config.neighbour_share)


def by_anchors(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): rare n-grams that the question shares with the chunk."""
    scores = anchor_scores(evidence.prompt_ids, evidence.question, config.chunk_size)
    return with_neighbours(scores, config.neighbour_share)


def by_both(evidence: Evidence, config: PrefillConfig) -> torch.Tensor:
    """Chunk scores (num_chunks,): attention and anchors, fused by rank."""
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


def anchor_scores(prompt_ids: Sequence[int], question: tuple[int, int], size: int) -> torch.Tensor:
    """How much each chunk shares with the question, counted in rare n-grams.

    Every n-gram of the question that occurs at most 8 times before it gives n, divided by the number of times it
    occurs, to each chunk that an occurrence touches. Integers only: no model, milliseconds.

    Parameters
    ----------
    prompt_ids
        The prompt.
    question
        Half-open span of the question in it; the body is what comes before.
    size
        Tokens per chunk.

    Returns
    -------
    torch.Tensor
        (ceil(num_tokens / size),), 0 where nothing is shared.

    Notes
    -----
    After PFlash's anchors (lexical overlap of the query's tail with the prompt's chunks).
    """
    ids = torch.as_tensor(prompt_ids)
    scores = torch.zeros(math.ceil(len(ids) / size), dtype=torch.float64)
    body, asked = ids[: question[0]], ids[question[0] : question[1]]
    # The question's tokens by small numbers, so that an n-gram fits one integer; 0 is every other token.
    words = torch.unique(asked)
    digits = len(words) + 1

    def numbered(tokens: torch.Tensor) -> torch.Tensor:
        at = torch.searchsorted(words, tokens).clamp(max=max(len(words) - 1, 0))
        return torch.where(words[at] == tokens, at + 1, 0)

    if not len(body) or not len(asked) or digits ** _ORDERS[0] >= 1 << 62:
        return scores
    body, asked = numbered(body), numbered(asked)
    for order in _ORDERS:
        if len(body) < order or len(asked) < order:
            continue
        radix = digits ** torch.arange(order)
        windows = body.unfold(0, order, 1)
        starts = torch.nonzero((windows > 0).all(dim=1))[:, 0]
        grams = (windows[starts] * radix).sum(dim=1)
        shared = torch.isin(grams, (asked.unfold(0, order, 1) * radix).sum(dim=1))
        starts, grams = starts[shared], grams[shared]
        _, owner, counts = torch.unique(grams, return_inverse=True, return_counts=True)
        times = counts[owner]
        starts, weights = starts[times <= _MAX_OCCURRENCES], order / times[times <= _MAX_OCCURRENCES].double()
        first, last = starts // size, (starts + order - 1) // size
        scores.index_add_(0, first, weights)
        # An order is shorter than two chunks of any sensible size; a gram over more of them counts at its ends.
        scores.index_add_(0, last[last > first], weights[last > first])
    return scores.float()


def fuse(anchors: torch.Tensor, attention: torch.Tensor, weight: float) -> torch.Tensor:
    """Weighted reciprocal rank fusion of two votes (num_chunks,); ties go to the earlier chunk.

    A chunk without an anchor gets nothing from that side.
    """
    lexical = torch.where(anchors > 0, weight / (_ranks(anchors) + _RANK_OFFSET), 0.0)
    return lexical + (1 - weight) / (_ranks(attention) + _RANK_OFFSET)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """0 for the highest score, and so on."""
    order = torch.argsort(scores, descending=True, stable=True)
    ranks = torch.empty(len(scores))
    ranks[order] = torch.arange(len(scores), dtype=ranks.dtype)
    return ranks
