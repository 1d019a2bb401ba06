"""The shortest prompt that a server prunes unasked: where nobody has said, none that gains nothing on its device."""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from spec_stack.config import PrefillConfig
from spec_stack.sglang.break_even import LENGTHS, Prefill, PrefillSeconds, measured_break_even
from spec_stack.sglang.guards import harmless
from spec_stack.sglang.launch_notes import prunes
from spec_stack.sglang.pooled_draft import PooledDraft
from spec_stack.sglang.ranks import largest_of_all
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)
# Longer than any prompt.
_NEVER = 2**30


def with_threshold(config: ServerConfig, target: Any, scoring: Any) -> ServerConfig:
    """Raise min_prompt_tokens to what was measured just now, unless it was given or calibrated.

    target, scoring: this rank's model runners, weights loaded. To be called by all ranks at once; the slowest one's
    threshold holds.
    """
    prefill = config.prefill
    if not prunes(config, None) or prefill.calibrated_by or "min_prompt_tokens" in prefill.given:
        return config
    even = 0
    with harmless("measuring where pruning pays", f"min_prompt_tokens stays {prefill.min_prompt_tokens}"):
        even = _measured(target, scoring, prefill, drafts=config.scoring_model is None)
    even = int(largest_of_all(torch.tensor([even], device=target.device)))
    if even <= prefill.min_prompt_tokens:
        return config
    return replace(config, prefill=replace(prefill, min_prompt_tokens=even))


def _measured(target_runner: Any, scoring_runner: Any, config: PrefillConfig, drafts: bool) -> int:
    with torch.no_grad():
        target = PrefillSeconds.measured(_prefill_of(target_runner))
        draft = PrefillSeconds.measured(_prefill_of(scoring_runner))
    even = measured_break_even(target, draft, config, drafts)
    logger.info(
        "%s: a prefill takes the target %.4f s and %.1f µs a token, the draft %.4f s and %.1f µs: pruning pays %s",
        *(NAME, target.base_s, 1e6 * target.per_token_s, draft.base_s, 1e6 * draft.per_token_s),
        f"from {even} tokens on" if even else "at no length, so prompts are pruned on request alone",
    )
    return even or _NEVER


def _prefill_of(runner: Any) -> Prefill:
    """Prefill synthetic tokens in buffers that go with it."""
    pool = PooledDraft(runner, LENGTHS[-1])
    token_ids = array("q", [7 * at % min(int(runner.model_config.vocab_size), 1000) for at in range(LENGTHS[-1])])

    def prefill(num_tokens: int) -> None:
        following = pool.forward(token_ids[:num_tokens], np.arange(num_tokens))
        if following is not None:
            # Asking for the number waits for the device.
            int(following)

    return prefill
