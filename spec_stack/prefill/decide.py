"""When a prompt is pruned, and why."""

from __future__ import annotations

from collections.abc import Sequence

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span


def decide_scoring(
    specprefill: bool | None,
    config: PrefillConfig,
    num_prompt_tokens: int,
    protected: Sequence[Span],
    num_draft_tokens: int = 0,
    scoring_limit: int | None = None,
) -> tuple[bool, str]:
    """Whether to score the prompt, and why.

    num_draft_tokens: the prompt's length in the draft's tokens. scoring_limit: the longest context that the draft sees
    whole, None for any. Raises ValueError where specprefill is not True, False or None.
    """
    if specprefill not in (True, False, None):
        raise ValueError(f"specprefill must be True, False or None (by length), got {specprefill!r}")
    num_prunable = num_prompt_tokens - sum(stop - start for start, stop in protected)
    if specprefill is False:
        return False, "off: the call asked for dense prefill"
    if config.rate_for(num_prompt_tokens) == 1:
        return False, "off: keep_rate is 1.0"
    if specprefill is None and num_prompt_tokens < config.min_prompt_tokens:
        return False, f"off: the prompt is shorter than min_prompt_tokens={config.min_prompt_tokens}"
    if num_prunable <= (config.keep_first + config.keep_last) * config.chunk_size:
        return False, f"off: no more than {num_prunable} of {num_prompt_tokens} prompt tokens could be pruned"
    if scoring_limit is not None and num_draft_tokens + config.look_ahead > scoring_limit:
        return False, f"off: every attention layer of the draft slides over {scoring_limit} tokens, and none sees more"
    if specprefill is True:
        return True, "on: the call asked for it"
    return True, f"on: the prompt has min_prompt_tokens={config.min_prompt_tokens} or more"
