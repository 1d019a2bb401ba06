"""The prompt length from which sparse prefill is faster than dense prefill, by whatever costs are known. Pure.

Costs are counted multiply-adds (`prefill.cost`) or measured seconds: of first tokens (`spec-stack doctor --measure`),
or of forwards (a server at launch).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np

from spec_stack.config import PrefillConfig

Cost = Callable[[float], float]
"""Seconds, or multiply-adds, by number of tokens."""
LONGEST = 1 << 20
_SHORTEST, _LENGTHS_PER_DOUBLING = 64, 8


def num_kept(config: PrefillConfig, num_tokens: int) -> float:
    """Tokens of a prompt that the target prefills; the forced ends count."""
    return min(num_tokens, max(sum(config.forced_tokens), config.rate_for(num_tokens) * num_tokens))


def break_even(
    config: PrefillConfig,
    target: Cost,
    scoring: Cost,
    draft: Cost = lambda num_tokens: 0.0,
    longest: int = LONGEST,
) -> int:
    """The shortest prompt, in tokens, that sparse prefill speeds up; 0 for none.

    target: a prefill of the target. scoring: the draft's pass over a prompt, any look-ahead included. draft: the
    draft's prefill for drafting, of all tokens without and of the kept ones with sparse prefill. longest: most tokens.
    """

    def sparse(num_tokens: float) -> float:
        kept = num_kept(config, int(num_tokens))
        return scoring(num_tokens) + target(kept) + draft(kept)

    return shortest_gain(lambda num_tokens: target(num_tokens) + draft(num_tokens), sparse, longest)


def shortest_gain(dense: Cost, sparse: Cost, longest: int = LONGEST) -> int:
    """The least number of tokens at which `sparse` costs less than `dense`; 0 for none.

    Lengths rise by 9 % from 64 tokens on, so the answer is exact to that.
    """
    steps = range(_LENGTHS_PER_DOUBLING * int(np.log2(LONGEST / _SHORTEST)) + 1)
    lengths = (round(_SHORTEST * 2 ** (step / _LENGTHS_PER_DOUBLING)) for step in steps)
    return next((n for n in takewhile(lambda n: n <= longest, lengths) if sparse(n) < dense(n)), 0)
