"""The fields and methods of SGLang's that are read, set or overridden here, beside the functions that `hooks` wraps.

Checked at launch: a missing one would fail at a later request. `self_test` checks `protocols` on live objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

_SRT = "sglang.srt"
SEAMS: Mapping[str, tuple[str, ...]] = {
    f"{_SRT}.model_executor.forward_batch_info.ForwardBatch": (
        *("forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum"),
        *("seq_lens_cpu", "positions", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens"),
        *("extend_start_loc", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "spec_algorithm"),
        "capture_hidden_mode",
    ),
    f"{_SRT}.mem_cache.base_prefix_cache.MatchPrefixParams": ("key",),
    f"{_SRT}.mem_cache.base_prefix_cache.BasePrefixCache": ("reset",),
    f"{_SRT}.mem_cache.base_prefix_cache.InsertParams": ("key", "value"),
    f"{_SRT}.mem_cache.base_prefix_cache.EvictParams": ("num_tokens",),
    f"{_SRT}.mem_cache.radix_cache.RadixCache": (
        *("create_simulated", "match_prefix", "insert", "evict", "inc_lock_ref", "dec_lock_ref"),
        *("evictable_size", "protected_size"),
    ),
    f"{_SRT}.sampling.sampling_params.SamplingParams": (
        *("custom_params", "max_new_tokens", "min_new_tokens", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    ),
    f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo": ("acc_additive_penalties", "acc_scaling_penalties"),
    f"{_SRT}.speculative.eagle_info.EagleVerifyInput": ("retrieve_next_token", "draft_token", "draft_token_num"),
    f"{_SRT}.speculative.eagle_info.EagleDraftInput": (
        *("hidden_states", "topk_p", "topk_index", "bonus_tokens"),
        *("num_tokens_per_req", "num_tokens_for_logprob_per_req"),
    ),
    f"{_SRT}.managers.schedule_batch.ScheduleBatch": (
        *("req_pool_indices_cpu", "prefix_lens", "extend_lens", "seq_lens", "seq_lens_cpu", "seq_lens_sum"),
        "out_cache_loc",
    ),
    f"{_SRT}.model_executor.pool_configurator.MemoryPoolConfig": ("max_total_num_tokens",),
    f"{_SRT}.model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig": (
        "eagle_draft_num_layers",
    ),
    f"{_SRT}.managers.io_struct.BatchStrOutput": ("customized_info", "prompt_tokens", "cached_tokens"),
    f"{_SRT}.speculative.standalone_worker_v2.StandaloneWorkerV2": (
        *("_validate_vocab_compatibility", "apply_runtime_state", "forward_batch_generation"),
        *("verify", "on_verify_complete_cpu", "activate_step_by_batch", "build_adaptive_runtime_state"),
        "target_worker",
    ),
    f"{_SRT}.speculative.adaptive_runtime_state.AdaptiveController": ("init_states",),
    f"{_SRT}.model_executor.cuda_graph_config.PhaseConfig": ("backend", "bs"),
    f"{_SRT}.speculative.standalone_worker_v2.StandaloneDraftWorker": (
        *("alloc_memory_pool", "init_attention_backend"),
        *("_draft_extend_for_prefill", "_draft_extend_for_decode"),
    ),
}
"""Class -> names, each a field, an annotation or a method of the class."""


def missing() -> list[str]:
    """The seams that the installed SGLang lacks, as dotted names."""
    found = []
    for path, names in SEAMS.items():
        module, _, name = path.rpartition(".")
        owner = getattr(import_module(module), name, None)
        found += [f"{path}.{each}" for each in names if owner is None or not _has(owner, each)]
    return found


def _has(owner: type, name: str) -> bool:
    fields = {*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "__struct_fields__", ())}
    return name in fields or hasattr(owner, name)
