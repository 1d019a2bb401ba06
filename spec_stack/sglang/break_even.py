"""Measures, at launch, the prompt length from which pruning pays on this device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

from spec_stack.config import PrefillConfig
from spec_stack.prefill.break_even import break_even
from spec_stack.prefill.registry import needs_attention

# Token counts of the timed forwards; a longer one runs where the earlier ones do not tell a token's time. A large model
# on a CPU takes seconds for the second one.
LENGTHS = (128, 512, 1024, 2048, 4096)
_REPEATS = 3
# A forward at least this long is not repeated: disturbances are milliseconds.
_SLOW_S = 1.0
# While launching kernels dominates, tokens are free. Where a forward takes this many times as long as the shortest, one
# of half its length is past that, so the difference is the tokens' own.
_TELLING = 2.0
_LONGEST = 131_072
# Longer than any prompt.
NEVER = 2**30
Prefill = Callable[[int, int], None]


@dataclass(frozen=True)
class PrefillSeconds:
    """Seconds of a prefill: base_s for the weights, per_token_s per token.

    is_told: the timed lengths identify per_token_s; else it is an upper bound. behind_s: extra seconds per
    token of a chunk behind as many cached tokens.
    """

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
        """The line through the fastest forwards of the last two lengths.

        prefill: runs so many tokens behind so many cached ones, and waits for the device; the first forward of every
        length is not timed. most_tokens: the model's limit; at least the first two lengths run. agree: a collective
        that keeps all ranks on the same forwards. scores: the prefill uses this package's attention by chunks, so one
        behind a cache is timed too.
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
        """Of a share of the layers, chunk by chunk."""
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
    """The shortest prompt, in tokens, that pruning speeds up; 0 for none.

    drafts: the scoring model also drafts. layers: share of its layers that score.

    Notes
    -----
    A drafting model prefills every prompt in full, so pruning also saves that for the dropped tokens. A model that
    scores alone runs for scored prompts only. Attention's growth with length, which pruning and the window save too, is
    left out: longer prompts gain more. Scoring chunks alone, in this package's attention, count their cache.
    """
    by_length = draft.scoring(layers)

    def scoring(num_tokens: float) -> float:
        if not needs_attention(config.scorer):
            return 0.0
        return by_length.at(num_tokens) + (0.0 if config.asks_prompt else config.look_ahead * draft.at(1))

    return break_even(config, target.at, scoring, draft.at if drafts else lambda num_tokens: 0.0, _LONGEST)


def threshold_of(target: PrefillSeconds, draft: PrefillSeconds, even: int) -> tuple[int, str]:
    """The least min_prompt_tokens and the log message: NEVER where the draft is too slow at any length, 0 where
    unknown.

    even: of `measured_break_even`.
    """
    if not target.is_told or (not even and not draft.is_told):
        return 0, "too little to tell where pruning pays, so min_prompt_tokens stays"
    if even:
        return even, f"pruning pays from {even} tokens on"
    return NEVER, "pruning pays at no length, so prompts are pruned on request alone"
