"""What this room uses of SGLang's own objects, under the names that SGLang gives them.

SGLang's classes cannot be imported where there is no SGLang, and have hundreds of attributes. These name the few that
are read or changed here, so that a reader (and mypy) can tell what a function needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SamplingSettings(Protocol):
    """`sglang.srt.sampling.sampling_params.SamplingParams`."""

    custom_params: Any
    max_new_tokens: int | None
    ignore_eos: bool


class TokenizedRequest(Protocol):
    """`sglang.srt.managers.io_struct.TokenizedGenerateReqInput`: a request as it reaches the scheduler's process.

    input_ids: of the prompt; None where embeddings are given. extra_key: the client's own part of the radix key.
    """

    input_ids: Sequence[int] | None
    extra_key: str | None
    sampling_params: SamplingSettings


class RunningRequest(Protocol):
    """`sglang.srt.managers.schedule_batch.Req`: a request inside the scheduler.

    customized_info: lists that go out along with the output tokens, entry i with token i.
    """

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    customized_info: dict[str, list[Any]] | None
    is_retracted: bool
    sampling_params: SamplingSettings

    def finished(self) -> bool: ...


class Runner(Protocol):
    """`sglang.srt.model_executor.model_runner.ModelRunner`: one model on one device."""

    is_draft_worker: bool
    server_args: Any
    decode_attention_backend_str: str


class Scheduler(Protocol):
    """`sglang.srt.managers.scheduler.Scheduler`: one per process, with its pools and its two models."""

    model_config: Any
    server_args: Any
    spec_algorithm: Any
    draft_worker: Any
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    page_size: int
    chunked_prefill_size: int | None
