"""Rare words that a question shares with a text: no draft, milliseconds. For recall in later turns.

How it is used: `rare_words(prompt_ids, asked, units)` scores the units of the text before the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spec_stack.prefill.units import Units

# Lengths of the n-grams; one that occurs more often than this in the body tells too little.
_ORDERS = (2, 1)
MAX_OCCURRENCES = 4


def rare_words(
    prompt_ids: Sequence[int], question: tuple[int, int], units: Units, half_life: float = math.inf
) -> torch.Tensor:
    """How much each unit shares with the question, counted in rare n-grams. No model; milliseconds.

    Every n-gram (n is 1 or 2) of the question that occurs at most 4 times in the body gives n, divided by the number
    of times it occurs there, to each unit that an occurrence touches.

    Parameters
    ----------
    prompt_ids
        The prompt.
    question
        Half-open span of the question in it; the body is what comes before.
    units
        Of the prompt, or of its beginning: what lies behind them is not voted on.
    half_life
        An n-gram's weight halves with every so many tokens from its end to the question's, for a span that may hold
        more than the question.

    Returns
    -------
    torch.Tensor
        (num_units,), 0 where nothing is shared.

    Notes
    -----
    The idea is PFlash's: chunks are anchored by words that they share with the end of the prompt. The short n-grams
    and the half-life are ours, chosen on the wordings of the needles that a calibration hides.
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
    """Add votes (n,) to the units in which the first and the last token of each place (n,) stand; scores (num_units,)
    are changed in place. A unit gets a vote once, and one past the last unit's end gets none."""
    owner = torch.cat([units.owner, torch.full((1,), len(units))])
    first, last = (owner[at.clamp(max=units.num_tokens)] for at in (starts, lasts))
    for unit, counts in ((first, first < len(units)), (last, (last > first) & (last < len(units)))):
        scores.index_add_(0, unit[counts], votes[counts])
