"""The shortest prompt that a server prunes by default: where not configured, the launch times both models' prefill.

No SGLang import before a measurement.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.break_even import break_even
from spec_stack.prefill.registry import needs_attention
from spec_stack.sglang.errors import log_failure
from spec_stack.sglang.server_args import NAME, ServerConfig

logger = logging.getLogger(__name__)
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

    is_told: the timed lengths identify per_token_s; else it is an upper bound. behind_s: extra seconds per token of a
    chunk behind as many cached tokens.
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

        prefill: runs so many tokens behind so many cached ones, and waits for the device. most_tokens: the model's
        limit; at least the first two lengths run. agree: a collective that keeps all ranks on the same forwards.
        scores: a chunk behind a cache is timed too.
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
    """Seconds of the quickest run but the first, which may compile."""
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

    drafts: the scoring model also drafts, so it prefills every prompt, and pruning saves that for the dropped tokens.
    layers: share of its layers that score. Attention's growth with length is left out: longer prompts gain more.
    """
    by_length = draft.scoring(layers)

    def scoring(num_tokens: float) -> float:
        if not needs_attention(config.scorer):
            return 0.0
        return by_length.at(num_tokens) + (0.0 if config.queries_from_prompt else config.look_ahead * draft.at(1))

    return break_even(config, target.at, scoring, draft.at if drafts else lambda num_tokens: 0.0, _LONGEST)


def threshold_of(target: PrefillSeconds, draft: PrefillSeconds, even: int) -> tuple[int, str]:
    """The least min_prompt_tokens by a break-even, and the log message; 0 where unknown."""
    if not target.is_told or (not even and not draft.is_told):
        return 0, "too little to tell where pruning pays, so min_prompt_tokens stays"
    if even:
        return even, f"pruning pays from {even} tokens on"
    return NEVER, "pruning pays at no length, so prompts are pruned on request alone"


def with_threshold(config: ServerConfig, target: Any, scoring: Any) -> ServerConfig:
    """Raise min_prompt_tokens to the measured value, unless it was given, or set by a calibration.

    target, scoring: this rank's model runners, weights loaded. All ranks must call it together; the slowest one's
    threshold holds.
    """
    from spec_stack.sglang.ranks import largest_of_all, num_ranks

    prefill = config.prefill
    # A calibration's own fields are among those that were given; those that ship set no shortest prompt.
    if not config.prunes or "min_prompt_tokens" in prefill.given:
        return config
    even = 0
    try:
        even = _measured(target, scoring, prefill, drafts=config.scoring_model is None)
    except Exception:
        # The others wait in a collective of the very forward that this rank has left.
        if num_ranks() > 1:
            raise
        log_failure("measuring where pruning pays", f"min_prompt_tokens stays {prefill.min_prompt_tokens}")
    if target.device != "cpu":
        # The blocks of the longest forward, which may fit no later one.
        torch.get_device_module(target.device).empty_cache()
    even = int(largest_of_all(torch.tensor([even], device=target.device)))
    if even <= prefill.min_prompt_tokens:
        return config
    return replace(config, prefill=replace(prefill, min_prompt_tokens=even))


def _measured(target_runner: Any, scoring_runner: Any, config: PrefillConfig, drafts: bool) -> int:
    from spec_stack.sglang.ranks import all_say_yes

    def seconds(runner: Any, scores: bool = False) -> PrefillSeconds:
        most_tokens = int(runner.model_config.context_len)
        return PrefillSeconds.measured(_prefill_of(runner), most_tokens=most_tokens, agree=all_say_yes, scores=scores)

    with torch.no_grad():
        target, draft = seconds(target_runner), seconds(scoring_runner, scores=True)
    num_layers = int(scoring_runner.model_config.hf_text_config.num_hidden_layers)
    layers = min(config.resolved_scoring_layers or num_layers, num_layers) / num_layers
    threshold, found = threshold_of(target, draft, measured_break_even(target, draft, config, drafts, layers))
    logger.info(
        "%s: a prefill takes the target %.4f s and %.1f µs a token, the draft %.4f s and %.1f µs, %.1f µs cached: %s",
        *(NAME, target.base_s, 1e6 * target.per_token_s, draft.base_s, 1e6 * draft.per_token_s),
        *(1e6 * (draft.per_token_s + draft.behind_s), found),
    )
    return threshold


def _prefill_of(runner: Any) -> Prefill:
    """Prefills synthetic tokens, in a pool for the last length alone: few models need the longest."""
    from spec_stack.sglang.draft_scoring_runner import DraftScoringRunner

    pools: dict[tuple[int, int], DraftScoringRunner] = {}
    num_ids = min(int(runner.model_config.vocab_size), 1000)

    def prefill(num_tokens: int, num_cached: int) -> None:
        slots = np.arange(num_cached + num_tokens)
        token_ids = array("q", [7 * at % num_ids for at in slots.tolist()])
        pool = pools.get((num_tokens, num_cached))
        if pool is None:
            pools.clear()
            pool = pools[num_tokens, num_cached] = DraftScoringRunner(runner, len(slots))
            if num_cached:
                pool.forward(token_ids[:num_cached], slots[:num_cached])
        following = pool.forward(token_ids[num_cached:], slots)
        if following is not None:
            # Reading the number waits for the device.
            int(following)

    return prefill
