"""The shortest prompt that a server prunes by default: measured at launch where not configured."""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from spec_stack.config import PrefillConfig
from spec_stack.sglang.break_even import Prefill, PrefillSeconds, measured_break_even, threshold_of
from spec_stack.sglang.guards import note_failure
from spec_stack.sglang.launch_notes import prunes
from spec_stack.sglang.pooled_draft import PooledDraft
from spec_stack.sglang.ranks import all_say_yes, largest_of_all, num_ranks
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)


def with_threshold(config: ServerConfig, target: Any, scoring: Any) -> ServerConfig:
    """Raise min_prompt_tokens to the measured value, unless it was given, or set by a calibration.

    target, scoring: this rank's model runners, weights loaded. All ranks must call it together; the slowest one's
    threshold holds.
    """
    prefill = config.prefill
    # A calibration's own fields are among those that were given; those that ship set no shortest prompt.
    if not prunes(config, None) or "min_prompt_tokens" in prefill.given:
        return config
    even = 0
    try:
        even = _measured(target, scoring, prefill, drafts=config.scoring_model is None)
    except Exception:
        # The others wait in a collective of the very forward that this rank has left.
        if num_ranks() > 1:
            raise
        note_failure("measuring where pruning pays", f"min_prompt_tokens stays {prefill.min_prompt_tokens}")
    if target.device != "cpu":
        # The blocks of the longest forward, which may fit no later one.
        torch.get_device_module(target.device).empty_cache()
    even = int(largest_of_all(torch.tensor([even], device=target.device)))
    if even <= prefill.min_prompt_tokens:
        return config
    return replace(config, prefill=replace(prefill, min_prompt_tokens=even))


def _measured(target_runner: Any, scoring_runner: Any, config: PrefillConfig, drafts: bool) -> int:
    """The threshold; 0 where unknown."""
    with torch.no_grad():
        target, draft = _seconds(target_runner), _seconds(scoring_runner, scores=True)
    num_layers = int(scoring_runner.model_config.hf_text_config.num_hidden_layers)
    layers = min(config.num_asked_layers or num_layers, num_layers) / num_layers
    threshold, found = threshold_of(target, draft, measured_break_even(target, draft, config, drafts, layers))
    logger.info(
        "%s: a prefill takes the target %.4f s and %.1f µs a token, the draft %.4f s and %.1f µs, %.1f µs cached: %s",
        *(NAME, target.base_s, 1e6 * target.per_token_s, draft.base_s, 1e6 * draft.per_token_s),
        *(1e6 * (draft.per_token_s + draft.behind_s), found),
    )
    return threshold


def _seconds(runner: Any, scores: bool = False) -> PrefillSeconds:
    most_tokens = int(runner.model_config.context_len)
    return PrefillSeconds.measured(_prefill_of(runner), most_tokens=most_tokens, agree=all_say_yes, scores=scores)


def _prefill_of(runner: Any) -> Prefill:
    """Prefill synthetic tokens in own buffers, as long as the longest yet: few models need the longest."""
    pools: dict[tuple[int, int], PooledDraft] = {}
    num_ids = min(int(runner.model_config.vocab_size), 1000)

    def prefill(num_tokens: int, num_cached: int) -> None:
        slots = np.arange(num_cached + num_tokens)
        token_ids = array("q", [7 * at % num_ids for at in slots.tolist()])
        pool = pools.get((num_tokens, num_cached))
        if pool is None:
            pools.clear()
            pool = pools[num_tokens, num_cached] = PooledDraft(runner, len(slots))
            if num_cached:
                pool.forward(token_ids[:num_cached], slots[:num_cached])
        following = pool.forward(token_ids[num_cached:], slots)
        if following is not None:
            # Reading the number waits for the device.
            int(following)

    return prefill
