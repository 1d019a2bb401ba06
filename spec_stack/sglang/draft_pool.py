"""The scoring draft over a KV pool of its own: SGLang's model and weights.

SGLang's STANDALONE draft uses the target's KV slots, so prefilling a prompt there would take the target's room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from spec_stack.devices import attend, to_device
from spec_stack.prefill.draft_kv_budget import Ints
from spec_stack.prefill.importance import ScoredLayer
from spec_stack.sglang.draft_prefixes import DraftPrefixes

Queries = dict[int, list[torch.Tensor]]
"""Scoring queries by layer, (num_heads, n, head_dim), in parts along n."""


def extend_batch(
    input_ids: torch.Tensor,
    rows: Sequence[int],
    before: Sequence[int],
    lengths: Sequence[int],
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> ForwardBatch:
    """SGLang's batch of prefills outside its scheduler: of each row lengths[i] tokens behind before[i] others.

    input_ids, slots, positions: (sum(lengths),), on the device.
    """
    ends = [num_before + num_new for num_before, num_new in zip(before, lengths, strict=True)]
    numbers = torch.tensor([list(rows), ends, list(before), list(lengths)])
    on_device, seq_lens, starts, num_new = to_device(numbers, input_ids.device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=input_ids,
        req_pool_indices=on_device,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        seq_lens_sum=sum(ends),
        seq_lens_cpu=torch.tensor(ends),
        positions=positions,
        extend_num_tokens=sum(lengths),
        extend_seq_lens=num_new.int(),
        extend_prefix_lens=starts.int(),
        extend_start_loc=(num_new.cumsum(0) - num_new).int(),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens_cpu=list(before),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


@contextmanager
def draft_forward(attention: AttentionBackend) -> Iterator[None]:
    """SGLang's model of a draft runs in the block, outside of SGLang's workers."""
    moe = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
    with torch.no_grad(), moe[0], moe[1], forward_context(ForwardContext(attn_backend=attention)):
        yield


class DraftScoringRunner(AttentionBackend):  # type: ignore[misc]
    """The draft with the KV of whole texts in num_tokens slots: its model, its attention, and their buffers.

    num_layers: the draft's first layers, which alone have KV and run; None is all. index: which slots hold which text.
    The buffers are (num_layers, num_tokens, num_kv_heads, dim).
    """

    def __init__(self, runner: Any, num_tokens: int, num_layers: int | None = None) -> None:
        self._runner, self.device = runner, torch.device(runner.device)
        self.index = DraftPrefixes(num_tokens)
        self._num_layers = num_layers
        self._layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)][:num_layers]
        self._at = {layer.layer_id: at for at, layer in enumerate(self._layers)}
        self._keys = self._values = torch.empty(0, dtype=runner.dtype, device=self.device)
        # Of the forward at work.
        self._captured: Queries | None = None
        self._num_captured = 1
        self._read: slice | torch.Tensor = slice(0, 0)
        self._written: slice | torch.Tensor = slice(0, 0)
        # Some models ask the pool whether they may write keys themselves. They may not.
        self.token_to_kv_pool = SimpleNamespace(dtype=None)

    def allocate(self) -> None:
        """Allocate the pool once, before SGLang sizes its own pools; the first forward is too late."""
        if self._keys.numel():
            return
        first, num = self._layers[0], (len(self._layers), self.index.num_slots)
        for_all: dict[str, Any] = {"dtype": self._runner.dtype, "device": self.device}
        self._keys = torch.empty((*num, first.tp_k_head_num, first.qk_head_dim), **for_all)
        self._values = torch.empty((*num, first.tp_k_head_num, first.v_head_dim), **for_all)

    @property
    def has_all_layers(self) -> bool:
        return self._num_layers is None

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def run(
        self,
        token_ids: Sequence[int],
        slots: Ints,
        captured: Queries | None = None,
        num_captured: int = 1,
    ) -> torch.Tensor | None:
        """Run the last n tokens of a text through the draft; logits (1, vocab) of the last one, without a
        synchronisation.

        slots: (num_tokens,), of the whole text so far; the last n are written, all are read. captured: takes the
        queries of the last num_captured tokens. First layers alone have no logits.
        """
        self.allocate()
        first = len(slots) - len(token_ids)
        positions = torch.arange(first, len(slots), device=self.device)
        input_ids = to_device(torch.frombuffer(array("q", token_ids), dtype=torch.int64), self.device)
        # Only the attention knows whose slots these are.
        batch = extend_batch(input_ids, [0], [first], [len(token_ids)], positions, positions)
        self._read, self._written = self._where(slots), self._where(slots[first:])
        self._captured, self._num_captured = captured, num_captured
        try:
            with draft_forward(self):
                return self._runner.model.forward(input_ids, positions, batch).next_token_logits  # type: ignore[no-any-return]
        except _LayersDoneError:
            return None

    def _where(self, slots: Ints) -> slice | torch.Tensor:
        # A slice copies nothing.
        if len(slots) and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all()):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return to_device(torch.from_numpy(slots), self.device)

    def scored_layer(self, index: int, captured: Queries, slots: Ints) -> ScoredLayer:
        """A captured layer over the keys of a text, whose slots these are."""
        at = self._at[index]
        keys = self._keys[at][self._where(slots)].transpose(0, 1)
        return ScoredLayer(torch.cat(captured[index], dim=1), keys, float(self._layers[at].scaling))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """SGLang's attention of one layer: (n, num_heads * head_dim). q likewise; k, v: (n, num_kv_heads, head_dim)."""
        at = self._at[layer.layer_id]
        self._keys[at][self._written] = k.to(self._keys.dtype)
        self._values[at][self._written] = v.view(-1, *self._values.shape[2:]).to(self._values.dtype)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
        if self._captured is not None:
            self._captured.setdefault(layer.layer_id, []).append(queries[:, -self._num_captured :].clone())
        if at + 1 == self._num_layers:
            raise _LayersDoneError
        keys, values = (kept[at][self._read].transpose(0, 1) for kept in (self._keys, self._values))
        output = attend(queries.to(keys.dtype), keys, values, float(layer.scaling))
        return output.transpose(0, 1).reshape(q.shape[0], -1).to(q.dtype)


class _LayersDoneError(Exception):
    """Ends a forward of SGLang's model after the wanted layers; on all ranks alike."""


@dataclass(frozen=True)
class PooledLayers(Mapping[int, ScoredLayer]):
    """The captured layers over a text's slots; the keys of one are gathered when it is asked for."""

    draft: DraftScoringRunner
    captured: Queries
    slots: Ints

    def __getitem__(self, index: int) -> ScoredLayer:
        return self.draft.scored_layer(index, self.captured, self.slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self.captured)

    def __len__(self) -> int:
        return len(self.captured)
