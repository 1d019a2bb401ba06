"""Rare words that a question shares with a text: no draft, milliseconds. For recall in later turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spec_stack.prefill.units import Units

# Lengths of the n-grams, and their most occurrences in the body.
_ORDERS = (2, 1)
MAX_OCCURRENCES = 4


def rare_words(
    prompt_ids: Sequence[int], question: tuple[int, int], units: Units, half_life: float = math.inf
) -> torch.Tensor:
    """Scores (num_units,): rare n-grams in common with the question. No model; milliseconds.

    Every n-gram (n is 1 or 2) of the question with 1 to 4 occurrences in the text before it gives n divided by that
    count to each unit that an occurrence touches. question: half-open span. units: of the prompt or its prefix.
    half_life: an n-gram's weight halves with every so many tokens to the question's end.

    After PFlash, which anchors chunks by words in common with the prompt's end; n and half-life are our own choice.
    """
    ids = torch.as_tensor(prompt_ids)
    scores = torch.zeros(len(units), dtype=torch.float64)
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
        rare = times <= MAX_OCCURRENCES
        starts, votes = starts[rare], order * weights[found[rare]] / times[rare]
        add_votes(scores, units, starts, starts + order - 1, votes)
    return scores.float()


def add_votes(
    scores: torch.Tensor, units: Units, starts: torch.Tensor, lasts: torch.Tensor, votes: torch.Tensor
) -> None:
    """Add votes (n,) to the units of the first and last token of each place (n,); scores (num_units,) change in place.

    A unit gets a vote once; places behind the last unit get none.
    """
    owner = torch.cat([units.owner, torch.full((1,), len(units))])
    first, last = (owner[at.clamp(max=units.num_tokens)] for at in (starts, lasts))
    for unit, counts in ((first, first < len(units)), (last, (last > first) & (last < len(units)))):
        scores.index_add_(0, unit[counts], votes[counts])
