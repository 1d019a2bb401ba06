"""The attributes of SGLang's that this package reads, sets or overrides, beside the functions that `hooks` wraps.

Checked at launch: `missing` by class, `self_test` the protocols on live objects. Protocols type the code where SGLang
is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

_SRT = "sglang.srt"
REQUIRED_ATTRIBUTES: Mapping[str, str] = {
    "model_executor.forward_batch_info.ForwardBatch": "forward_mode batch_size input_ids req_pool_indices seq_lens "
    "out_cache_loc seq_lens_sum seq_lens_cpu positions extend_num_tokens extend_seq_lens extend_prefix_lens "
    "extend_start_loc extend_seq_lens_cpu extend_prefix_lens_cpu spec_algorithm capture_hidden_mode",
    "mem_cache.base_prefix_cache.MatchPrefixParams": "key",
    "mem_cache.base_prefix_cache.BasePrefixCache": "reset",
    "mem_cache.base_prefix_cache.InsertParams": "key value",
    "mem_cache.base_prefix_cache.EvictParams": "num_tokens",
    "mem_cache.radix_cache.RadixCache": "create_simulated match_prefix insert evict inc_lock_ref dec_lock_ref "
    "evictable_size protected_size",
    "sampling.sampling_params.SamplingParams": "custom_params max_new_tokens min_new_tokens ignore_eos "
    "frequency_penalty presence_penalty repetition_penalty",
    "sampling.sampling_batch_info.SamplingBatchInfo": "acc_additive_penalties acc_scaling_penalties",
    "speculative.eagle_info.EagleVerifyInput": "retrieve_next_token draft_token draft_token_num",
    "speculative.eagle_info.EagleDraftInput": "hidden_states topk_p topk_index bonus_tokens num_tokens_per_req "
    "num_tokens_for_logprob_per_req",
    "managers.schedule_batch.ScheduleBatch": "req_pool_indices_cpu prefix_lens extend_lens seq_lens seq_lens_cpu "
    "seq_lens_sum out_cache_loc",
    "model_executor.pool_configurator.MemoryPoolConfig": "max_total_num_tokens",
    "model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig": "eagle_draft_num_layers",
    "managers.io_struct.BatchStrOutput": "customized_info prompt_tokens cached_tokens",
    "speculative.standalone_worker_v2.StandaloneWorkerV2": "_validate_vocab_compatibility apply_runtime_state "
    "forward_batch_generation verify on_verify_complete_cpu activate_step_by_batch build_adaptive_runtime_state "
    "target_worker",
    "speculative.adaptive_runtime_state.AdaptiveController": "init_states",
    "model_executor.cuda_graph_config.PhaseConfig": "backend bs",
    "speculative.standalone_worker_v2.StandaloneDraftWorker": "alloc_memory_pool init_attention_backend "
    "_draft_extend_for_prefill _draft_extend_for_decode",
}
"""Class -> its fields, annotations or methods."""


def missing() -> list[str]:
    """The required attributes that the installed SGLang lacks, as dotted names."""
    found = []
    for path, names in REQUIRED_ATTRIBUTES.items():
        module, _, name = f"{_SRT}.{path}".rpartition(".")
        owner = getattr(import_module(module), name, None)
        found += [f"{module}.{name}.{each}" for each in names.split() if owner is None or not _has(owner, each)]
    return found


def _has(owner: type, name: str) -> bool:
    fields = {*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "__struct_fields__", ())}
    return name in fields or hasattr(owner, name)


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
    length, for none. finished_len: length of the ended reply in output_ids; None is all.
    """

    rid: str
    origin_input_ids: Sequence[int]
    origin_input_ids_unpadded: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    output_ids: Sequence[int]
    finished_len: int | None
    extra_key: str | None
    cache_salt: str | None
    return_logprob: bool
    logprob_start_len: int
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
