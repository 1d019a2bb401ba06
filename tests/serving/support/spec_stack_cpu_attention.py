"""SGLang's torch_native attention, taught verification and multi-step drafting, so that STANDALONE runs on a CPU.

SGLang has no CPU attention for speculative decoding without AMX. This is test support: the shipped plugin leaves
attention backends alone. Environment variables put a part of the plugin out of action, for tests that must see
what it is good for.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib import import_module
from pathlib import Path

import torch

# What each hook, and what the worker calls beside them, does first; by module and qualified name.
FAULTS = {
    "options": ("request", "RequestOptions.parse"),
    "deciding": ("manager", "decide"),
    "setting aside": ("manager", "SparsePrefillManager._unscored"),
    "round": ("manager", "SparsePrefillManager._step"),
    "scoring": ("scoring", "DraftScorer.decide"),
    "placing": ("scoring", "decide_scored"),
    "forgetting": ("manager", "SparsePrefillManager.forget"),
    "state": ("manager", "SparsePrefillManager.state"),
    "report": ("request", "ReportAssembler.add"),
    "books": ("metrics", "ReportStore.close"),
    "acceptance": ("hooks", "correct_acceptance"),
    "counting": ("request", "ReportAssembler.num_prompt_tokens"),
    "header": ("headers", "RequestHeaders.options"),
    "telling": ("metrics", "SchedulerMetrics.tell"),
    "stream": ("metrics", "ReportStore.report_of"),
    "choosing": ("batch_policy", "BatchPolicy._policy"),
    "learning": ("batch_policy", "BatchPolicy._record"),
    "capping": ("batch_policy", "_cap"),
    "switching": ("worker", "_forget_earlier_gammas"),
    "caps": ("worker", "end_chains"),
    "finding penalties": ("penalties", "has_penalties"),
    "penalties": ("penalties", "_OutputCounts.correct"),
    "slots": ("draft_kv_slots", "DraftKVRow.begin"),
    "reading": ("draft_kv_slots", "DraftKVSlots._forward"),
    "places": ("draft_kv_slots", "DraftKVSlots._place"),
    "lengths": ("draft_kv_slots", "DraftKVSlots._lengths"),
}


def register():
    _teach_attention()
    if rank := os.environ.get("SPEC_STACK_TEST_FAIL_ON_RANK"):
        _fail_on(int(rank))
    if os.environ.get("SPEC_STACK_TEST_FAULTS"):
        _prepare_faults(Path(os.environ["SPEC_STACK_TEST_FAULTS"]))
    if os.environ.get("SPEC_STACK_TEST_COUNT_KV"):
        _count_written_slots()
    if os.environ.get("SPEC_STACK_TEST_BREAK_HOOK"):
        _break("Scheduler.get_next_batch_to_run")
    if os.environ.get("SPEC_STACK_TEST_FORK"):
        _fork_processes()


def _fork_processes():
    """SGLang spawns a server's processes, each of which imports for ten seconds what the first one has imported."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


def _prepare_faults(chosen):
    """While the file `chosen` holds a name of FAULTS, that function raises."""

    def faulty(name, function):
        def fail_or_call(*args, **kwargs):
            if chosen.is_file() and chosen.read_text() == name:
                raise RuntimeError(f"put out of action by a test: {name}")
            return function(*args, **kwargs)

        return fail_or_call

    for name, (module, path) in FAULTS.items():
        owner = import_module(f"spec_stack.sglang.{module}")
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        found = vars(owner)[attribute]
        is_bound = isinstance(found, classmethod)
        wrapped = faulty(name, found.__func__ if is_bound else found)
        setattr(owner, attribute, classmethod(wrapped) if is_bound else wrapped)


def _count_written_slots():
    """The state of a draft with slots of its own says how many slots of its pool have ever held something."""
    from spec_stack.sglang.draft_kv_slots import DraftKVSlots

    state = DraftKVSlots.state

    def with_count(draft):
        keys = draft._runner.token_to_kv_pool.get_key_buffer(0)
        return {**state(draft), "num_written": int(keys.flatten(1).any(dim=1).sum()), "num_slots": len(keys)}

    DraftKVSlots.state = with_count


def _fail_on(rank):
    """One rank alone cannot score long prompts, as if it had run out of memory."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    from spec_stack.prefill.attention import CapturedAttention

    reduce_heads = CapturedAttention.reduce_heads

    def fail_on_long_prompts(attention, *args):
        found = reduce_heads(attention, *args)
        if get_tp_group().rank_in_group == rank and found.shape[-1] > 600:
            raise MemoryError("put out of action by a test")
        return found

    CapturedAttention.reduce_heads = fail_on_long_prompts


def _break(name):
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target.__func__

    def apply_or_fail(cls, target, hooks):
        if target.endswith(name):
            raise ImportError("put out of action by a test")
        apply(cls, target, hooks)

    HookRegistry._apply_target = classmethod(apply_or_fail)


def _teach_attention():
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    class SpeculativeAttention(TorchNativeAttnBackend):
        # Draft steps after the first see one more slot each; None is ordinary decoding.
        draft_step = None
        prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

        def _run_sdpa_forward_decode(self, query, output, k_cache, v_cache, table, rows, seq_lens, *args, **kwargs):
            if self.draft_step is not None:
                seq_lens = seq_lens + self.draft_step + 1
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, table, rows, seq_lens, *args, **kwargs
            )

        def _run_sdpa_forward_extend(
            self,
            query,
            output,
            k_cache,
            v_cache,
            table,
            rows,
            seq_lens,
            prefix_lens,
            lens,
            encoder_lens=None,
            **options,
        ):
            # SGLang's runs the cached prefix's rows too, on uninitialized queries, and drops them: every verification
            # and every look-ahead token then costs as much attention as a prefill of the whole prompt.
            plain = encoder_lens is None and options["causal"] and options.get("sliding_window_size") in (None, -1)
            if not plain:
                return super()._run_sdpa_forward_extend(
                    query, output, k_cache, v_cache, table, rows, seq_lens, prefix_lens, lens, encoder_lens, **options
                )
            start = 0
            for row, end, prefix, new in zip(*(t.tolist() for t in (rows, seq_lens, prefix_lens, lens)), strict=True):
                slots = table[row, :end]
                output[start : start + new] = torch.nn.functional.scaled_dot_product_attention(
                    query[start : start + new].transpose(0, 1)[None],
                    k_cache[slots].transpose(0, 1)[None],
                    v_cache[slots].transpose(0, 1)[None],
                    attn_mask=torch.ones(new, end, dtype=torch.bool).tril(prefix) if prefix else None,
                    is_causal=not prefix,
                    scale=options["scaling"],
                    enable_gqa=options["enable_gqa"],
                )[0].transpose(0, 1)
                start += new
            return output

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            if not forward_batch.forward_mode.is_target_verify():
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            width = forward_batch.spec_info.draft_token_num
            output = torch.empty_like(q)
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
            if isinstance(forward_batch.spec_info, NgramVerifyInput):
                return self._verify_trees(q, output, layer, forward_batch, width)
            self._run_sdpa_forward_extend(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                output.view(-1, layer.tp_q_head_num, layer.v_head_dim),
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens + width,
                forward_batch.seq_lens,
                torch.full((forward_batch.batch_size,), width, dtype=torch.int64),
                None,
                scaling=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                causal=True,
            )
            return output

        def _verify_trees(self, q, output, layer, forward_batch, width):
            """Each node sees the request's slots before the tree, and its own branch."""
            branches = forward_batch.spec_info.custom_mask.view(-1, width, width).bool()
            keys, values = (
                get(layer.layer_id)
                for get in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
            )
            queries = q.view(len(branches), width, layer.tp_q_head_num, layer.qk_head_dim)
            outputs = output.view(len(branches), width, layer.tp_q_head_num, layer.v_head_dim)
            rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
            for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                slots = self.req_to_token_pool.req_to_token[row, : length + width]
                mask = torch.cat([torch.ones(width, length, dtype=torch.bool), branches[at]], dim=1)
                outputs[at] = torch.nn.functional.scaled_dot_product_attention(
                    queries[at].transpose(0, 1)[None],
                    keys[slots].transpose(0, 1)[None],
                    values[slots].transpose(0, 1)[None],
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )[0].transpose(0, 1)
            return output

    class MultiStepDraft:
        prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

        def __init__(self, runner, num_steps):
            self.attn_backends = []
            for step in range(num_steps - 1):
                backend = SpeculativeAttention(runner)
                backend.draft_step = step
                self.attn_backends.append(backend)

        def init_forward_metadata(self, forward_batch):
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    def create_decode(create, factory):
        if factory.draft_model_runner.device != "cpu":
            return create(factory)
        steps = factory.speculative_num_steps
        return MultiStepDraft(factory.draft_model_runner, steps) if steps > 1 else None

    def create_extend(create, factory):
        if factory.draft_model_runner.device != "cpu":
            return create(factory)
        return SpeculativeAttention(factory.draft_model_runner)

    attention_registry.register_attention_backend("torch_native")(SpeculativeAttention)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{factory}.create_decode_backend", create_decode, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_draft_extend_backend", create_extend, HookType.AROUND)
