"""Measure, at launch, from which length on pruning a prompt pays on this very device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

import numpy as np

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention

# Tokens of the forwards that are timed, each tried where the ones before it do not tell what a token takes: a large
# model on a CPU takes seconds for the second one.
LENGTHS = (128, 512, 1024, 2048, 4096)
_REPEATS = 3
# A forward that takes so long even at its quickest is not repeated again: what disturbs it is milliseconds.
_SLOW_S = 1.0
# While a device is busy launching kernels, tokens are free. Where a forward takes this many times as long as the
# shortest, one of half its length is no longer bound by that, so what lies between the two is the tokens' own.
_TELLING = 2.0
_LONGEST = 131_072
# Longer than any prompt.
NEVER = 2**30
Prefill = Callable[[int, int], None]


@dataclass(frozen=True)
class PrefillSeconds:
    """Seconds of a prefill: base_s for the weights, per_token_s for every token. is_told: whether the lengths that were
    timed tell what a token takes; else it takes less than shows. behind_s: what a token takes on top of that behind as
    many cached ones, which a long prompt's chunks are."""

    base_s: float
    per_token_s: float
    is_told: bool = True
    behind_s: float = 0.0

    @classmethod
    def measured(
        cls,
        prefill: Prefill,
        clock: Callable[[], float] = perf_counter,
        most_tokens: int = LENGTHS[-1],
        agree: Callable[[bool], bool] = bool,
        scores: bool = False,
    ) -> PrefillSeconds:
        """The line through the quickest forwards of the last two lengths.

        Parameters
        ----------
        prefill
            Runs so many tokens behind so many cached ones, and returns when it is done; the first forward of every
            length is not timed.
        clock
            Seconds.
        most_tokens
            That the model can take; at least the first two lengths are run.
        agree
            Makes the ranks of a group, which must run the same forwards, end with one another: whether all say so.
        scores
            Whether the model's prefill is this package's own, chunk by chunk, so that one behind a cache is timed too.
        """
        lengths = [*LENGTHS[:2], *(length for length in LENGTHS[2:] if length <= most_tokens)]
        quickest = [_quickest(partial(prefill, lengths[0], 0), clock, agree)]
        is_told = False
        for num_tokens in lengths[1:]:
            quickest.append(_quickest(partial(prefill, num_tokens, 0), clock, agree))
            is_told = agree(quickest[-1] >= _TELLING * quickest[0])
            if is_told:
                break
        (short, long), (before, last) = list(pairwise(lengths))[len(quickest) - 2], quickest[-2:]
        per_token_s = max(last - before, 0.0) / (long - short)
        seconds = cls(max(last - long * per_token_s, 0.0), per_token_s, is_told)
        chunk = min(long, most_tokens // 2)
        if not scores or chunk < 1:
            return seconds
        behind = _quickest(partial(prefill, chunk, chunk), clock, agree)
        return replace(seconds, behind_s=max(behind - seconds.at(chunk), 0.0) / chunk)

    def at(self, num_tokens: float) -> float:
        return self.base_s + self.per_token_s * num_tokens

    def scoring(self, share: float) -> PrefillSeconds:
        """Of a part of the layers alone, chunk by chunk."""
        return PrefillSeconds(share * self.base_s, share * (self.per_token_s + self.behind_s), self.is_told)


def _quickest(run: Callable[[], None], clock: Callable[[], float], agree: Callable[[bool], bool]) -> float:
    spent: list[float] = []
    while len(spent) <= _REPEATS:
        begun = clock()
        run()
        spent.append(clock() - begun)
        if len(spent) > 1 and agree(min(spent) >= _SLOW_S):
            break
    return min(spent[1:])


def measured_break_even(
    target: PrefillSeconds, draft: PrefillSeconds, config: PrefillConfig, drafts: bool = True, layers: float = 1.0
) -> int:
    """Return the shortest prompt that is ready sooner pruned than whole, in tokens; 0 where none is.

    Parameters
    ----------
    target, draft
        What was measured.
    config
        How prompts are scored, and how much of them is kept.
    drafts
        Whether the model that scores also drafts.
    layers
        Share of its layers that score.

    Notes
    -----
    On a server a model that also drafts prefills every prompt whole to draft behind it. So pruning spares the target's
    prefill of what is dropped, and the draft's too, and costs the draft's pass over the prompt by the layers that
    score, and a look-ahead where one asks. A model that scores alone prefills a prompt to score it and only then.
    Attention's growth with length, which pruning and the draft's window spare too, is left out: a longer prompt gains
    more. Only the chunks of a scoring, whose attention is this package's own, are taken as they are behind a cache.
    """
    scoring, looking = draft.scoring(layers), 0.0
    if not needs_attention(config.scorer):
        scoring = PrefillSeconds(0.0, 0.0)
    elif not config.asks_prompt:
        looking = config.look_ahead * draft.at(1)
    for length in np.geomspace(256, _LONGEST, 73):
        num_tokens = round(float(length))
        kept = min(num_tokens, max(sum(config.forced_tokens), config.rate_for(num_tokens) * num_tokens))
        cost = scoring.at(num_tokens) + looking
        if drafts:
            cost += draft.at(kept) - draft.at(num_tokens)
        if cost < target.per_token_s * (num_tokens - kept):
            return num_tokens
    return 0


def threshold_of(target: PrefillSeconds, draft: PrefillSeconds, even: int) -> tuple[int, str]:
    """Return the least min_prompt_tokens, and what to say of it: NEVER where a draft is clearly too dear at any length,
    0 where nothing can be told. even: what `measured_break_even` says."""
    if not target.is_told or (not even and not draft.is_told):
        return 0, "too little to tell where pruning pays, so min_prompt_tokens stays"
    if even:
        return even, f"pruning pays from {even} tokens on"
    return NEVER, "pruning pays at no length, so prompts are pruned on request alone"
