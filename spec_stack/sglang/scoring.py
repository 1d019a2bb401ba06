"""Scoring a prompt with the engine's own draft: chunked prefill, look-ahead, importance (SpecPrefill, section 3.2).

A scoring is done in parts, between which the scheduler goes on with its own batches. It borrows KV slots and a request
row of the engine from its first part to its last, and gives them back whatever happens.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.chunks import DRAFT_FREE
from spec_stack.prefill.selection import select
from spec_stack.sglang.head_votes import LayerQueries, best_of_own_heads, key_scale
from spec_stack.sglang.protocols import Scheduler
from spec_stack.sglang.ranks import largest_of_all, own_rank
from spec_stack.types import Selection


class NoRoomError(RuntimeError):
    """The KV pool cannot lend what scoring needs. Not a fault: the prompt waits, or is prefilled densely."""


@dataclass(frozen=True)
class Prompt:
    """A prompt to score. Equal prompts have equal selections.

    extra_key, cache_salt: the walls of SGLang's radix cache, which nothing about a prompt crosses. end_ids: tokens
    after which the look-ahead stops. num_built_on: tokens at the beginning that are cached densely and kept; only those
    after them are scored, over the cached ones.
    """

    token_ids: tuple[int, ...]
    extra_key: str | None
    cache_salt: str | None
    config: PrefillConfig
    protected: tuple[Span, ...] = ()
    end_ids: frozenset[int] = frozenset()
    num_built_on: int = 0


def can_build_on_cache() -> bool:
    """Whether a row may begin with slots of the radix cache: in SGLang from 0.5.22 on that has not been tried."""
    return hasattr(Req, "set_extend_range")


@contextmanager
def captured_queries(model: torch.nn.Module, layers: dict[int, LayerQueries]) -> Iterator[None]:
    """Add the queries of every forward of the model inside the block to what there is by layer.

    Hooks stand on this model's attention layers, for the block alone. query: (num_tokens, num_heads * head_dim), rotary
    positions applied. A captured graph would run past them.
    """

    def keep(layer: Any, args: tuple[Any, ...]) -> None:
        query = args[0]
        found = layers.setdefault(layer.layer_id, LayerQueries(float(layer.scaling), key_scale(layer)))
        found.queries.append(query.reshape(query.shape[0], -1, layer.qk_head_dim).transpose(0, 1).clone())

    handles = [
        module.register_forward_pre_hook(keep) for module in model.modules() if isinstance(module, RadixAttention)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def needs_the_draft(config: PrefillConfig) -> bool:
    """Whether a scorer asks the draft at all, or votes by the tokens alone."""
    return config.scorer not in DRAFT_FREE


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [(start - by, stop - by) for start, stop in spans]


class DraftScorer:
    """Scores prompts with a scheduler's draft, one at a time. Raises whatever the engine raises.

    evict_share: the share of the KV pool that a scoring may take from the radix cache, where free slots are too few.
    """

    def __init__(self, scheduler: Scheduler, evict_share: float) -> None:
        self._scheduler: Any = scheduler
        self._runner = scheduler.draft_worker.draft_worker.draft_runner
        self._evict_share = evict_share
        self._row: _BorrowedRow | None = None

    @property
    def num_slots_held(self) -> int:
        """KV slots that a scoring under way holds, which no request and no cache accounts for."""
        return 0 if self._row is None else self._row.num_slots_held

    def cached(self, prompt: Prompt) -> Any:
        """SGLang's match for the prompt as a dense one. Takes no lock."""
        # SGLang prefills at least one token, so the last one counts as not cached.
        key = RadixKey(
            array("q", prompt.token_ids),
            prompt.extra_key,
            limit=max(len(prompt.token_ids) - 1, 0),
            cache_salt=prompt.cache_salt,
        )
        return self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))

    def num_cached(self, prompt: Prompt) -> int:
        return len(self.cached(prompt).device_indices)

    def score(self, prompt: Prompt) -> Generator[None, None, Selection]:
        """Score a prompt part by part.

        Parameters
        ----------
        prompt
            With num_built_on over 0, only what comes after is scored, over the cached keys of what comes before.

        Yields
        ------
        None
            After every part of the work. Each must run inside `working()`. Closing the generator gives back what it
            holds.

        Returns
        -------
        Selection
            What the target is to prefill; the same on all ranks of a tensor-parallel group.

        Raises
        ------
        NoRoomError
            Where the KV pool lends no slots now.
        """
        limit = int(self._scheduler.model_config.context_len)
        num_tokens = len(prompt.token_ids)
        config = replace(prompt.config, look_ahead=max(0, min(prompt.config.look_ahead, limit - num_tokens)))
        if not needs_the_draft(prompt.config):
            base, protected = prompt.num_built_on, prompt.protected
            return self._keep_beginning(prompt, select(prompt.token_ids[base:], None, config, _moved(protected, base)))
        if not prompt.num_built_on:
            importance = yield from self._importance(prompt, config, 0, None)
            return select(prompt.token_ids, importance.cpu(), config, prompt.protected)
        base = prompt.num_built_on
        tree, match = self._scheduler.tree_cache, self.cached(prompt)
        # SGLang's draft holds token j + 1 in slot j. So the cached slots hold what a row that begins with token 1 needs
        # there, but for the last of them, whose next token may be another request's.
        page = self._scheduler.page_size
        shared = match.device_indices[: max(0, min(len(match.device_indices), base) - 1) // page * page]
        lock = tree.inc_lock_ref(match.last_device_node)
        try:
            importance = yield from self._importance(prompt, config, 1, shared)
        finally:
            tree.dec_lock_ref(match.last_device_node, lock.to_dec_params())
        fresh = select(prompt.token_ids[base:], importance[base - 1 :].cpu(), config, _moved(prompt.protected, base))
        return self._keep_beginning(prompt, fresh)

    @staticmethod
    def _keep_beginning(prompt: Prompt, fresh: Selection) -> Selection:
        """The tokens the prompt is built on, and what was selected of those after them."""
        base = prompt.num_built_on
        positions = [*range(base), *(base + position for position in fresh.positions)]
        token_ids = [prompt.token_ids[position] for position in positions]
        return Selection(token_ids, positions, len(prompt.token_ids))

    def _importance(
        self, prompt: Prompt, config: PrefillConfig, first: int, shared: torch.Tensor | None
    ) -> Generator[None, None, torch.Tensor]:
        """Importance (num_tokens - first,) of the tokens from `first` on; the `shared` slots hold the first of them."""
        num_tokens, num_shared = len(prompt.token_ids) - first, 0 if shared is None else len(shared)
        self._check_room(num_tokens - num_shared + config.look_ahead)
        row = self._row = _BorrowedRow(self._scheduler, self._runner, prompt.token_ids[first:], shared)
        try:
            # Ranks may fail one by one, and agree after every part. So no part has such a place before a collective:
            # those are in the draft's forwards, and in the last part.
            yield
            chunk = self._chunk(config)
            for start in range(num_shared, num_tokens - 1, chunk):
                row.prefill(min(start + chunk, num_tokens - 1))
                yield
            layers: dict[int, LayerQueries] = {}
            token_id = self._next_token(row, num_tokens, layers)
            for drafted in range(config.look_ahead):
                # Nine forwards of one token, run without graphs, may take longer than a chunk.
                yield
                row.append(token_id)
                ended = token_id in prompt.end_ids
                token_id = self._next_token(row, num_tokens + drafted + 1, layers)
                if ended:
                    break
            yield
            best = best_of_own_heads(self._runner.token_to_kv_pool, row.slots(num_tokens), layers, config, own_rank())
            yield
            return largest_of_all(best).mean(dim=0)
        finally:
            self._row = None
            row.release()

    def _next_token(self, row: _BorrowedRow, end: int, layers: dict[int, LayerQueries]) -> int:
        """The draft's most likely token after the row's first `end`. Adds its last token's queries to layers."""
        with captured_queries(self._runner.model, layers):
            return int(row.prefill(end))

    def _check_room(self, num_slots: int) -> None:
        """Asked beforehand, because SGLang empties its radix cache before it finds that there is no room."""
        allocator = self._scheduler.token_to_kv_pool_allocator
        evictable = min(self._scheduler.tree_cache.evictable_size(), int(self._evict_share * allocator.size))
        free = allocator.available_size() + evictable
        if num_slots + self._scheduler.page_size > free:
            raise NoRoomError(f"the KV pool has room for {free} tokens, and scoring needs {num_slots}")
        if self._scheduler.req_to_token_pool.available_size() < 1:
            raise NoRoomError("every request row is in use, and scoring needs one")

    def _chunk(self, config: PrefillConfig) -> int:
        server = self._scheduler.chunked_prefill_size
        return min(config.prefill_chunk, server) if server and server > 0 else config.prefill_chunk

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around every part of a scoring; nothing of it outlives the part."""
        moe = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
        with torch.no_grad(), self._on_forward_stream(), self._eager(), moe[0], moe[1]:
            yield

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
    """A request that the scheduler never sees. It holds a row and KV slots of the engine's pools until released.

    shared: KV slots of the radix cache, whole pages of them, that hold its first tokens; they stay the cache's.
    """

    def __init__(
        self, scheduler: Any, runner: Any, prompt_ids: Sequence[int], shared: torch.Tensor | None = None
    ) -> None:
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
        self._shared = shared
        self._num_shared = 0 if shared is None else len(shared)
        self._num_prefilled = self._num_shared

    @property
    def num_slots_held(self) -> int:
        if not self._req.kv.holds_kv:
            return 0
        page = self._scheduler.page_size
        num_allocated = int(self._req.kv.kv_allocated_len)
        return -(-num_allocated // int(page)) * int(page) - self._num_shared

    def append(self, token_id: int) -> None:
        self._req.full_untruncated_fill_ids.append(token_id)

    def prefill(self, end: int) -> torch.Tensor:
        """Put the tokens from where the last call ended up to `end` through the draft; its most likely next token ().

        The host does not wait for it, unless it asks for the number.
        """
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
        return logits[-1].argmax()  # type: ignore[no-any-return]

    def slots(self, num_tokens: int) -> torch.Tensor:
        """KV slots (num_tokens,) of the first tokens."""
        return self._scheduler.req_to_token_pool.req_to_token[self._req.kv.req_pool_idx, :num_tokens].long()  # type: ignore[no-any-return]

    def release(self) -> None:
        """Give everything back."""
        if not self._req.kv.holds_kv:
            return
        # A failed allocation leaves the row with what earlier chunks were given.
        borrowed = self.slots(self._req.kv.kv_allocated_len)[self._num_shared :]
        self._scheduler.token_to_kv_pool_allocator.free(borrowed)
        self._scheduler.req_to_token_pool.free(self._req)

    def _set_range(self, start: int, end: int) -> None:
        if hasattr(self._req, "set_extend_range"):  # SGLang up to 0.5.21
            if self._req.kv.holds_kv:
                self._req.prefix_indices = self.slots(start)
            elif self._shared is not None:
                self._req.prefix_indices = self._shared.long()
            self._req.set_extend_range(start, end)
        else:
            self._req.prefix_len = start
            self._req.extend_end = end
