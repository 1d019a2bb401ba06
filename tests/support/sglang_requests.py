"""Requests as the plugin sees them inside the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spec_stack.sglang.request import RequestOptions, attach
from tests.support.sampling_settings import sampling_params

REPORT: dict[str, Any] = {
    "num_prompt_tokens": 9,
    "num_kept_tokens": 4,
    "num_scored_tokens": 9,
    "num_draft_tokens": 9,
    "num_protected_tokens": 0,
    "num_cached_tokens": 0,
    "num_recalled_tokens": 0,
    "follow_up": "recall",
    "sparse_prefill": True,
    "sparse_prefill_reason": "on",
    "outcome": "pruned",
    "keep_rate": 4 / 9,
    "scoring_s": 0.1,
    "policy": "fixed",
}


def request_of(rid: str, options: RequestOptions | None = None, num_prompt_tokens: int = 3) -> Any:
    request = SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * num_prompt_tokens,
        output_ids=[1],
        customized_info=None,
        logprob_start_len=-1,
        is_retracted=False,
        finished=lambda: False,
        sampling_params=sampling_params(),
    )
    attach(request, options or RequestOptions(), REPORT)
    return request
