"""Scoring a prompt with the engine's own draft: chunked prefill, look-ahead, importance (SpecPrefill, section 3.2).

The pass borrows KV slots and a request row of the engine, and gives them back before it returns, whatever happens. It
runs on the scheduler's thread, so other requests wait for it.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from spec_stack.config import PrefillConfig
from spec_stack.prefill.importance import token_importance
from spec_stack.prefill.selection import select
from spec_stack.types import Selection


class NoRoomError(RuntimeError):
    """The KV pool cannot lend the slots that scoring needs now. Not a fault: the prompt is prefilled densely."""


@dataclass
class _LayerQueries:
    scaling: float
    queries: list[torch.Tensor] = field(default_factory=list)


class QueryCapture:
    """The hook on every attention layer: hands on to SGLang, and keeps the queries while scoring asks for them."""

    def __init__(self) -> None:
        self._layers: dict[int, _LayerQueries] | None = None

    def attend(self, attend: Any, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around `RadixAttention.forward`; query (num_tokens, num_heads * head_dim), rotary positions applied."""
        if self._layers is not None:
            found = self._layers.setdefault(layer.layer_id, _LayerQueries(float(layer.scaling)))
            found.queries.append(query.reshape(query.shape[0], -1, layer.qk_head_dim).transpose(0, 1).clone())
        return attend(layer, query, *args, **kwargs)

    @contextmanager
    def on(self) -> Iterator[dict[int, _LayerQueries]]:
        """Collect the queries of every forward inside the block, by layer."""
        self._layers = {}
        try:
            yield self._layers
        finally:
            self._layers = None


class DraftScorer:
    """Scores prompts with a scheduler's draft. Raises whatever the engine raises, with nothing left allocated."""

    def __init__(self, scheduler: Any, capture: QueryCapture) -> None:
        self._scheduler = scheduler
        self._capture = capture
        self._runner = scheduler.draft_worker.draft_worker.draft_runner

    @torch.no_grad()
    def select(self, prompt_ids: Sequence[int], config: PrefillConfig, end_ids: Collection[int]) -> Selection:
        """The prompt tokens the target is to prefill. All ranks of a tensor-parallel group select alike.

        end_ids: tokens after which the look-ahead stops. Raises NoRoomError where the KV pool has none.
        """
        limit = int(self._scheduler.model_config.context_len)
        config = replace(config, look_ahead=max(0, min(config.look_ahead, limit - len(prompt_ids))))
        moe = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
        with self._on_forward_stream(), self._eager(), moe[0], moe[1]:
            importance = self._importance(list(prompt_ids), config, end_ids)
        return select(prompt_ids, importance.cpu(), config)

    def _importance(self, prompt_ids: list[int], config: PrefillConfig, end_ids: Collection[int]) -> torch.Tensor:
        num_tokens, chunk = len(prompt_ids), self._chunk(config)
        self._check_room(num_tokens + config.look_ahead)
        row = _BorrowedRow(self._scheduler, self._runner, prompt_ids)
        try:
            for start in range(0, num_tokens - 1, chunk):
                row.prefill(min(start + chunk, num_tokens - 1))
            with self._capture.on() as layers:
                token_id = row.prefill(num_tokens)
                for drafted in range(config.look_ahead):
                    row.append(token_id)
                    ended = token_id in end_ids
                    token_id = row.prefill(num_tokens + drafted + 1)
                    if ended:
                        break
            slots = row.slots(num_tokens)
            pool = self._runner.token_to_kv_pool
            # Slot by slot and layer by layer: one layer's keys and attention are all that is held at a time.
            captured = (
                (torch.cat(found.queries, dim=1), pool.get_key_buffer(layer)[slots].transpose(0, 1), found.scaling)
                for layer, found in sorted(layers.items())
            )
            return token_importance(captured, config.pool_kernel, self._over_ranks)
        finally:
            row.release()

    def _check_room(self, num_slots: int) -> None:
        """Asked beforehand, because SGLang empties its radix cache before it finds that there is no room."""
        page = self._scheduler.page_size
        free = self._scheduler.token_to_kv_pool_allocator.available_size() + self._scheduler.tree_cache.evictable_size()
        if num_slots + page > free:
            raise NoRoomError(f"the KV pool has room for {free} tokens, and scoring needs {num_slots}")

    def _chunk(self, config: PrefillConfig) -> int:
        server = self._scheduler.chunked_prefill_size
        return min(config.prefill_chunk, server) if server and server > 0 else config.prefill_chunk

    def _over_ranks(self, best: torch.Tensor) -> torch.Tensor:
        """Each rank holds some of the heads, and importance is a maximum over all of them."""
        group = get_tp_group()
        if group.world_size > 1:
            torch.distributed.all_reduce(best, op=torch.distributed.ReduceOp.MAX, group=group.device_group)
        return best

    @contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        """Under overlap scheduling the last batch may still run: wait for it, and use the stream it runs on."""
        stream = getattr(self._scheduler, "forward_stream", None)
        if stream is None or self._runner.device == "cpu":
            yield
            return
        current = torch.get_device_module(self._runner.device).current_stream()
        stream.wait_stream(current)
        try:
            with self._scheduler.forward_stream_ctx:
                yield
        finally:
            # Slots were given back on that stream, whether or not the scoring came to its end.
            current.wait_stream(stream)

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """A captured prefill graph would run past the hook on the attention layers."""
        graphs = self._runner.prefill_cuda_graph_runner
        self._runner.prefill_cuda_graph_runner = None
        try:
            yield
        finally:
            self._runner.prefill_cuda_graph_runner = graphs


class _BorrowedRow:
    """A request that the scheduler never sees. It holds a row and KV slots of the engine's pools until released."""

    def __init__(self, scheduler: Any, runner: Any, prompt_ids: Sequence[int]) -> None:
        params = SamplingParams(temperature=0, max_new_tokens=1)
        params.normalize(None)
        ids = array("q", prompt_ids)
        self._scheduler, self._runner = scheduler, runner
        self._req = Req(
            rid=f"spec-stack-{secrets.token_hex(4)}",
            origin_input_text="",
            origin_input_ids=ids,
            sampling_params=params,
        )
        self._req.full_untruncated_fill_ids = array("q", ids)
        self._req.logprob_start_len = -1
        self._num_prefilled = 0

    def append(self, token_id: int) -> None:
        self._req.full_untruncated_fill_ids.append(token_id)

    def prefill(self, end: int) -> int:
        """Put the tokens from where the last call ended up to `end` through the draft; its most likely next token."""
        self._set_range(self._num_prefilled, end)
        scheduler, runner = self._scheduler, self._runner
        batch = ScheduleBatch.init_new(
            reqs=[self._req],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        self._num_prefilled = end
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        logits = runner.forward(forward_batch).logits_output.next_token_logits
        return int(logits[-1].argmax())

    def slots(self, num_tokens: int) -> torch.Tensor:
        """KV slots (num_tokens,) of the first tokens."""
        return self._scheduler.req_to_token_pool.req_to_token[self._req.kv.req_pool_idx, :num_tokens].long()  # type: ignore[no-any-return]

    def release(self) -> None:
        """Give everything back."""
        if not self._req.kv.holds_kv:
            return
        # A failed allocation leaves the row with what earlier chunks were given.
        self._scheduler.token_to_kv_pool_allocator.free(self.slots(self._req.kv.kv_allocated_len))
        self._scheduler.req_to_token_pool.free(self._req)

    def _set_range(self, start: int, end: int) -> None:
        if hasattr(self._req, "set_extend_range"):  # SGLang up to 0.5.21
            if start:
                self._req.prefix_indices = self.slots(start)
            self._req.set_extend_range(start, end)
        else:
            self._req.prefix_len = start
            self._req.extend_end = end
