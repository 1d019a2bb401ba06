"""Measure, at launch, from which length on pruning a prompt pays on this very device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention

# Tokens of the forwards that are timed; short, since a large model on a CPU takes seconds for the longer one.
LENGTHS = (128, 512)
_REPEATS = 2
_LONGEST = 131_072
Prefill = Callable[[int], None]


@dataclass(frozen=True)
class PrefillSeconds:
    """Seconds of a prefill: base_s for the weights, per_token_s for every token."""

    base_s: float
    per_token_s: float

    @classmethod
    def measured(cls, prefill: Prefill, clock: Callable[[], float] = perf_counter) -> PrefillSeconds:
        """The line through the quickest forwards of two lengths. prefill: runs so many tokens, and returns when it is
        done; its first forward is not timed."""
        prefill(LENGTHS[0])
        quickest = []
        for num_tokens in LENGTHS:
            spent = []
            for _ in range(_REPEATS):
                begun = clock()
                prefill(num_tokens)
                spent.append(clock() - begun)
            quickest.append(min(spent))
        per_token_s = max(quickest[1] - quickest[0], 0.0) / (LENGTHS[1] - LENGTHS[0])
        return cls(max(quickest[0] - LENGTHS[0] * per_token_s, 0.0), per_token_s)

    def at(self, num_tokens: float) -> float:
        return self.base_s + self.per_token_s * num_tokens


def measured_break_even(
    target: PrefillSeconds, draft: PrefillSeconds, config: PrefillConfig, drafts: bool = True
) -> int:
    """Return the shortest prompt that is ready sooner pruned than whole, in tokens; 0 where none is.

    Notes
    -----
    On a server a model that also drafts prefills every prompt whole: to score it, or else to draft behind it. So
    pruning spares the target's prefill of what is dropped, and costs the draft a second prefill of what is kept, and a
    look-ahead where one asks. A model that scores alone (drafts is False) prefills a prompt to score it and only then.
    Attention's growth with length, which pruning spares too, is left out: a longer prompt gains more.
    """
    looking = 0.0
    if needs_attention(config.scorer) and not config.asks_prompt:
        looking = config.look_ahead * draft.at(1)
    for length in np.geomspace(256, _LONGEST, 73):
        num_tokens = round(float(length))
        kept = min(num_tokens, max(sum(config.forced_tokens), config.rate_for(num_tokens) * num_tokens))
        if draft.at(kept if drafts else num_tokens) + looking < target.per_token_s * (num_tokens - kept):
            return num_tokens
    return 0
