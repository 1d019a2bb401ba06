"""SGLang's draft over its own slots: a bounded number of chosen positions of each request's text.

It has its own KV pool and request table: backends and graphs are SGLang's, and the target is unchanged. Rows have
equally many slots and share none, so a request's end needs no clean-up. See `DraftKVBudget` for long texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.eagle_info import EagleDraftInput

from spec_stack.config import PrefillConfig
from spec_stack.devices import to_device
from spec_stack.prefill.draft_kv_budget import DraftKVBudget, Ints
from spec_stack.sglang.draft_kv_rows import DraftKVRow, num_row_slots, pool_slots
from spec_stack.sglang.draft_pool import draft_forward, extend_batch
from spec_stack.sglang.errors import log_failure
from spec_stack.sglang.request import RunningRequest, was_wrong

# Draft backends that take positions for KV lengths, by `common_template`, and those that have lengths.
_BUILT_FROM_POSITIONS = ("triton", "flashinfer")
_BUILT_FROM_LENGTHS = ("torch_native", "fa3", "trtllm_mha")


@dataclass(frozen=True)
class _Part:
    """Tokens that the draft takes in at once behind num_before slots of a row. at: the request's place in its batch."""

    row: int
    positions: Ints
    num_before: int
    token_ids: Ints
    at: int = 0


class DraftKVSlots:
    """The rows of one draft runner, whose pools are not yet made. slot_bytes: of one slot.

    Memory is reserved here, before SGLang divides the rest, and passed to the draft's pool by `pools`. The prompt's
    chosen part is prefilled in the first step after the target's prefill, so it delays no first token::

        target's row   0 1 2 3 4 5 6 7 8 9        the text's tokens, one slot each; 10 is the newest one, not yet in it
        draft's row    0 1 4 5 8 9 10             chosen positions; shift 4: 10 is at place 6
    """

    def __init__(self, runner: Any, config: PrefillConfig, max_gamma: int, num_requests: int, slot_bytes: int) -> None:
        self._runner, self._config = runner, config
        self.num_per_request = num_row_slots(config, max_gamma)
        self.num_bytes = pool_slots(num_requests, self.num_per_request) * slot_bytes
        self._reserve = torch.empty(self.num_bytes, dtype=torch.uint8, device=runner.device)
        self._rows: dict[int, DraftKVRow] = {}
        self._num_prefilled: dict[int, int] = {}
        self.max_num_used = self.num_renewals = self.num_restored = 0

    def pools(self, config: Any, target_rows: ReqToTokenPool) -> tuple[Any, ReqToTokenPool]:
        """The configuration of the draft's KV pool, and its table, for SGLang. Called once."""
        del self._reserve
        if self._runner.device != "cpu":
            torch.get_device_module(self._runner.device).empty_cache()
        num_rows, length = target_rows.req_to_token.shape
        device = self._runner.device
        own = ReqToTokenPool(num_rows, max(length, self.num_per_request), device, enable_memory_saver=False)
        self._table = own.req_to_token
        self._shifts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._shifts_cpu = torch.zeros(num_rows, dtype=torch.int64)
        return replace(config, max_total_num_tokens=num_rows * self.num_per_request), own

    def state(self) -> dict[str, int]:
        """max_num_used: most slots in use by one request at a choice."""
        names = ("num_per_request", "num_bytes", "max_num_used", "num_renewals", "num_restored")
        return {name: getattr(self, name) for name in names}

    # A request's beginning

    def note_prefill(self, batch: Any) -> None:
        """Note a batch of prompts, or of chunks of them, that the target has just prefilled."""
        try:
            lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
            for row, (prefix, new) in zip(batch.req_pool_indices_cpu.tolist(), lengths, strict=True):
                self._rows.pop(row, None)
                self._num_prefilled[row] = prefix + new
        except Exception:
            log_failure("noting a prefill for the draft", "all requests' slots are chosen anew")
            self._rows.clear()
            self._num_prefilled.clear()

    def no_proposal(self, next_token_ids: torch.Tensor) -> EagleDraftInput:
        """SGLang's result of a draft prefill, without one: `begin_step` fills in the proposal."""
        shape = (len(next_token_ids), 1)
        return EagleDraftInput(
            topk_p=torch.ones(shape, dtype=torch.float32, device=next_token_ids.device),
            topk_index=torch.zeros(shape, dtype=torch.int64, device=next_token_ids.device),
            bonus_tokens=next_token_ids,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )

    def has_new(self, batch: Any) -> bool:
        """Return whether the next step is a request's first one."""
        return any(row not in self._rows for row in batch.req_pool_indices_cpu.tolist())

    def begin_step(self, batch: Any) -> None:
        """Choose slots for requests of the next step, where they have none or their choice is due.

        Mutates batch.spec_info: the first token of a new request's proposal.
        """
        try:
            self._choose_and_read(batch)
        except Exception:
            # All begin anew in their next step, at places that exist.
            for row in batch.req_pool_indices_cpu.tolist():
                self._rows.pop(row, None)
                self._num_prefilled.pop(row, None)
                self._shifts[row] = self._shifts_cpu[row] = 0
            raise

    def _choose_and_read(self, batch: Any) -> None:
        new: list[list[_Part]] = [[]]
        renewed: list[_Part] = []
        for at, (row, request) in enumerate(zip(batch.req_pool_indices_cpu.tolist(), batch.reqs, strict=True)):
            kv_row = self._rows.get(row)
            if kv_row is None:
                if sum(len(part.positions) for part in new[-1]) >= self._config.prefill_chunk:
                    new.append([])
                new[-1].append(self._begin_row(row, batch, at))
            elif kv_row.is_due(len(request.origin_input_ids) + len(request.output_ids), was_wrong(request)):
                text = _text_of(request)
                recalled = kv_row.renew(text)
                self.num_renewals += 1
                self.num_restored += len(recalled)
                if len(recalled):
                    renewed.append(_Part(row, recalled, kv_row.num_used - len(recalled), text[recalled]))
                self._show(row, kv_row)
        for parts in filter(None, new):
            new_at = to_device(torch.tensor([part.at for part in parts]), self._shifts.device)
            logits = self._forward(parts, batch.spec_info.bonus_tokens[new_at])
            batch.spec_info.topk_index[new_at] = logits.argmax(dim=-1, keepdim=True)
        if renewed:
            self._forward(renewed)

    def _begin_row(self, row: int, batch: Any, at: int) -> _Part:
        # Slot 0 is reserved: padding is written there.
        slots = np.arange(self.num_per_request) + 1 + row * self.num_per_request
        kv_row = self._rows[row] = DraftKVRow(slots, DraftKVBudget.of(self._config))
        text = self._prefilled_of(batch, at, row)
        positions = kv_row.begin(text)
        self._show(row, kv_row)
        return _Part(row, positions, 0, np.append(text, 0)[positions], at)

    def _prefilled_of(self, batch: Any, at: int, row: int) -> Ints:
        """The target's tokens of a request's text; 0 for those that the host does not know after a failed step."""
        text = _text_of(batch.reqs[at])
        num_tokens = self._num_prefilled.pop(row, None)
        if num_tokens is None:
            num_tokens = len(text) - 1 if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu[at])
        return np.append(text[:num_tokens], np.zeros(max(0, num_tokens - len(text)), dtype=np.int64))

    def _show(self, row: int, kv_row: DraftKVRow) -> None:
        slots = torch.from_numpy(kv_row.slots).to(self._table.dtype)
        self._table[row, : len(slots)] = to_device(slots, self._table.device)
        self._shifts[row] = self._shifts_cpu[row] = kv_row.shift
        self.max_num_used = max(self.max_num_used, kv_row.num_used)

    def _forward(self, parts: Sequence[_Part], newest: torch.Tensor | None = None) -> torch.Tensor:
        """The logits after each part (n, vocab). newest: (n,), the parts' last tokens if the host lacks them."""
        runner, device = self._runner, self._shifts.device
        rows, before = [part.row for part in parts], [part.num_before for part in parts]
        lengths = [len(part.positions) for part in parts]
        spans = zip(rows, before, lengths, strict=True)
        slots = torch.cat([self._table[row, start : start + length] for row, start, length in spans]).long()
        positions = to_device(torch.from_numpy(np.concatenate([part.positions for part in parts])), device)
        input_ids = to_device(torch.from_numpy(np.concatenate([part.token_ids for part in parts])), device)
        batch = extend_batch(input_ids, rows, before, lengths, slots, positions)
        if newest is not None:
            input_ids[batch.extend_seq_lens.cumsum(0) - 1] = newest.to(input_ids)
        # Image placeholders are no tokens.
        input_ids.clamp_(0, int(runner.model_config.vocab_size) - 1)
        self._plan(batch)
        with draft_forward(runner.attn_backend):
            runner.attn_backend.init_forward_metadata(batch)
            logits: torch.Tensor = runner.model.forward(input_ids, batch.positions, batch).next_token_logits
        return logits

    def _plan(self, forward_batch: Any) -> None:
        """Since 0.5.22 SGLang keeps a batch's slots in a plan, too."""
        translator = self._runner.kv_index_translator
        if hasattr(translator, "own_plan"):
            translator.own_plan(forward_batch).bind(forward_batch, translator)

    # A step

    def place(self, forward_batch: Any, batch: Any) -> None:
        """Give a forward of the draft its own lengths, slots and positions. Mutates forward_batch.

        A batch that catches up has its lengths and slots already (`catching_up`).
        """
        try:
            self._place(forward_batch, batch)
        except Exception:
            log_failure("placing the draft", "what it proposes is not accepted")
            # It reads and writes the reserved slot.
            forward_batch.seq_lens = torch.ones_like(forward_batch.seq_lens)
            forward_batch.out_cache_loc = torch.zeros_like(forward_batch.out_cache_loc)

    def _place(self, forward_batch: Any, batch: Any) -> None:
        mode = forward_batch.forward_mode
        shifts = self._shifts[forward_batch.req_pool_indices]
        if mode.is_decode():
            width = forward_batch.out_cache_loc.numel() // forward_batch.batch_size
            lengths = self._lengths(batch)
            forward_batch.seq_lens, forward_batch.seq_lens_cpu, forward_batch.seq_lens_sum = lengths
            forward_batch.out_cache_loc = self._slots(batch, lengths[0], width)
            self._plan(forward_batch)
            positions = lengths[0] + shifts
        elif mode.is_draft_extend_v2():
            positions = forward_batch.positions.view(len(shifts), -1) + shifts[:, None]
        else:
            return
        most = int(self._runner.model_config.context_len) - 1
        forward_batch.positions = positions.reshape(-1).clamp(max=most).to(forward_batch.positions)

    @contextmanager
    def catching_up(self, batch: Any, num_tokens: int) -> Iterator[None]:
        """In the block, a batch has the draft's lengths and slots: num_tokens tokens of every request are taken in."""
        names = ("seq_lens", "seq_lens_cpu", "seq_lens_sum", "out_cache_loc")
        before = [getattr(batch, name) for name in names]
        try:
            lengths = self._lengths(batch)
            own = (*lengths, self._slots(batch, lengths[0], num_tokens))
        except Exception:
            log_failure("placing the draft", "its next proposal is not accepted")
            # The reserved slot.
            nowhere = torch.zeros(len(batch.seq_lens) * num_tokens, dtype=torch.int64, device=batch.seq_lens.device)
            own = (*before[:3], nowhere)
        for name, value in zip(names, own, strict=True):
            setattr(batch, name, value)
        try:
            yield
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(batch, name, value)

    def _lengths(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None, int | None]:
        """The draft's tokens of each request, the newest included: on the device, and, if known, on the host."""
        lengths = batch.seq_lens + 1 - self._shifts[batch.req_pool_indices].to(batch.seq_lens)
        if batch.seq_lens_cpu is None:
            return lengths, None, None
        on_host = batch.seq_lens_cpu + 1 - self._shifts_cpu[batch.req_pool_indices_cpu].to(batch.seq_lens_cpu)
        return lengths, on_host, int(on_host.sum())

    def _slots(self, batch: Any, lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
        places = lengths.long()[:, None] + torch.arange(num_tokens, device=lengths.device)
        slots: torch.Tensor = self._table[batch.req_pool_indices.long()[:, None], places]
        return slots.reshape(-1).long()


def _text_of(request: RunningRequest) -> Ints:
    return np.array([*request.origin_input_ids, *request.output_ids], dtype=np.int64)


def protect_kv_lengths(backend: Any, name: str) -> None:
    """Make a multi-step draft backend build its KV indices from lengths: the slots stand at positions of the text.

    Mutates backend, which is None where no step drafts more than one token. name: the attention backend's. Raises
    ValueError for one that has not been tried, RuntimeError for one that SGLang has changed.
    """
    if name not in (*_BUILT_FROM_POSITIONS, *_BUILT_FROM_LENGTHS):
        raise ValueError(
            "--spec-stack-sparse-prefill draft_only needs a draft whose attention takes its lengths from lengths; name "
            f"{', '.join([*_BUILT_FROM_LENGTHS, *_BUILT_FROM_POSITIONS])} by --speculative-draft-attention-backend"
        )
    if backend is None or name in _BUILT_FROM_LENGTHS:
        return
    build = getattr(backend, "common_template", None)
    if build is None:
        raise RuntimeError(
            f"SGLang's {type(backend).__name__} has no common_template, by which its KV lengths are protected; "
            "install a tested version"
        )

    def common_template(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        positions = forward_batch.positions
        forward_batch.positions = forward_batch.seq_lens.repeat_interleave(backend.topk).to(positions.dtype)
        try:
            return build(forward_batch, *args, **kwargs)
        finally:
            forward_batch.positions = positions

    backend.common_template = common_template
