"""When a prompt is pruned, and why."""

from __future__ import annotations

from collections.abc import Sequence

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.prefill.registry import needs_attention


def decide_scoring(
    config: PrefillConfig,
    num_new_tokens: int,
    protected: Sequence[Span],
    obstacle: str = "",
    text: str = "prompt",
) -> tuple[bool, str]:
    """Return whether to score a text in order to prune it, and why.

    num_new_tokens: of the prompt, or of a turn's new text; protected: spans of these. obstacle: why the draft cannot
    score it, if so. text: its name in the reason.
    """
    if config.sparse_prefill in ("off", "draft_only"):
        return False, f'off: sparse_prefill="{config.sparse_prefill}" leaves the target dense'
    if config.rate_for(num_new_tokens) == 1:
        return False, "off: keep_rate is 1.0"
    if config.sparse_prefill == "auto" and num_new_tokens < config.min_prompt_tokens:
        return False, f"off: the {text} is shorter than min_prompt_tokens={config.min_prompt_tokens}"
    num_prunable = num_new_tokens - sum(stop - start for start, stop in protected)
    if num_prunable <= sum(config.forced_tokens):
        return False, f"off: no more than {num_prunable} of {num_new_tokens} {text} tokens could be pruned"
    if obstacle:
        return False, f"off: {obstacle}"
    by = f"; calibrated by {config.calibrated_by}" if config.calibrated_by else ""
    if config.sparse_prefill == "on":
        return True, f'on: sparse_prefill="on"{by}'
    return True, f"on: the {text} has min_prompt_tokens={config.min_prompt_tokens} or more{by}"


def scoring_obstacle(
    config: PrefillConfig, num_draft_tokens: int, max_positions: int, scoring_limit: int | None
) -> str:
    """Why the draft cannot score a prompt of so many of its tokens; empty if it can.

    max_positions: the draft's. scoring_limit: the longest context that a layer of it sees whole, None for any.
    """
    num_repeated = MOST_REPEATED if config.queries_from_prompt else 0
    num_behind = num_repeated or config.look_ahead
    if num_draft_tokens + num_repeated > max_positions:
        obstacle = f"the prompt has {num_draft_tokens} tokens, and the draft {max_positions} positions"
    elif scoring_limit is not None and num_draft_tokens + num_behind > scoring_limit:
        obstacle = f"every attention layer of the draft slides over {scoring_limit} tokens, and none sees more"
    else:
        return ""
    return obstacle if needs_attention(config.scorer) else ""
