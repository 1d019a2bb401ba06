"""SGLang's objects as this package reads and sets them; types where SGLang is not installed.

`self_test` checks them at launch on live objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SamplingSettings(Protocol):
    """`sglang.srt.sampling.sampling_params.SamplingParams`."""

    custom_params: Any
    max_new_tokens: int | None
    min_new_tokens: int
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class RunningRequest(Protocol):
    """`sglang.srt.managers.schedule_batch.Req`: a request inside the scheduler.

    customized_info: lists sent along with the output tokens, entry i with token i. extra_key, cache_salt: the client's
    parts of the radix key. logprob_start_len: the first prompt token with a requested logprob; -1, or the prompt's
    length, for none.
    """

    rid: str
    origin_input_ids: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    cache_salt: str | None
    return_logprob: bool
    logprob_start_len: int
    customized_info: dict[str, list[Any]] | None
    is_retracted: bool
    sampling_params: SamplingSettings

    def finished(self) -> bool: ...


class Scheduler(Protocol):
    """`sglang.srt.managers.scheduler.Scheduler`: one per process, with its pools and its two models.

    chunked_req: the request whose prefill continues in the next prefill batch. _prefill_decode_interval_remaining:
    rounds without a prefill batch that remain.
    """

    model_config: Any
    server_args: Any
    spec_algorithm: Any
    tp_worker: Any
    draft_worker: Any
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    tokenizer: Any
    waiting_queue: list[Any]
    running_batch: Any
    last_batch: Any
    chunked_req: Any
    page_size: int
    chunked_prefill_size: int | None
    prefill_decode_interval: int
    _prefill_decode_interval_remaining: int
