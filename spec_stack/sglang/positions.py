"""Original positions of a pruned prompt's KV slots; draft KV lengths stay slot counts.

Slot j of K kept of N tokens is at kept[j] while j < K, else at j + (N - K), in every kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from spec_stack.devices import to_device
from spec_stack.sglang.protocols import Runner
from spec_stack.sglang.support import draft_positions_are_mapped


class PositionMap:
    """One pruned prompt's map from slots to original positions, for the target and for the draft.

    kept: original positions (K of num_prompt_tokens) in the order of the slots; the last one is the prompt's last.
    """

    def __init__(self, kept: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_dropped = num_prompt_tokens - len(kept)
        self.target = torch.tensor(kept, dtype=torch.int64)
        # SGLang's drafts hold the token after the slot's (EAGLE's shift), one position early: distances must agree.
        self.draft = torch.cat([(self.target[1:] - 1).clamp(min=0), self.target[-1:]])


class BatchMap:
    """The maps of a batch as four tensors, so that a step costs a few kernels at any batch size.

    maps[i] is None where request i was prefilled densely.
    """

    def __init__(self, maps: Sequence[PositionMap | None], is_draft: bool, device: torch.device) -> None:
        tables = [
            torch.empty(0, dtype=torch.int64) if it is None else it.draft if is_draft else it.target for it in maps
        ]
        sizes = torch.tensor([len(table) for table in tables])
        self._rows = torch.arange(len(maps), device=device)
        self._table = to_device(torch.cat(tables), device)
        self._sizes = to_device(sizes, device)
        self._starts = to_device(sizes.cumsum(0) - sizes, device)
        self._dropped = to_device(torch.tensor([0 if it is None else it.num_dropped for it in maps]), device)

    def __call__(self, slots: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Original positions of a flat batch whose request i has lengths[i] of the slots; their shape and dtype.

        Raises RuntimeError where the lengths do not add up, since all later positions would be wrong.
        """
        if sum(lengths) != slots.numel() or len(lengths) != len(self._rows):
            raise RuntimeError(f"{slots.numel()} positions for requests of {list(lengths)} tokens; nothing is mapped")
        if len(set(lengths)) == 1:
            row = self._rows.repeat_interleave(lengths[0])
        else:
            counts = to_device(torch.tensor(lengths), slots.device)
            row = self._rows.repeat_interleave(counts, output_size=slots.numel())
        where = (self._starts[row] + slots).clamp(max=len(self._table) - 1)
        mapped = torch.where(slots < self._sizes[row], self._table[where], slots + self._dropped[row])
        return mapped.to(slots.dtype)


class BatchOffsets:
    """The maps of a batch that decodes, drafts or verifies: one offset per request, valid from the prompt's last slot
    on (for the draft one slot earlier).
    """

    def __init__(self, maps: Sequence[PositionMap | None], device: torch.device) -> None:
        self._dropped = to_device(torch.tensor([0 if it is None else it.num_dropped for it in maps]), device)

    def __call__(self, slots: torch.Tensor) -> torch.Tensor:
        """Original positions of a flat batch with equally many slots per request; their shape and dtype.

        Raises RuntimeError where the slots do not divide evenly, since all later positions would be wrong.
        """
        num_requests = len(self._dropped)
        if slots.numel() % num_requests:
            raise RuntimeError(f"{slots.numel()} positions cannot be shared evenly by {num_requests} requests")
        mapped = slots.reshape(num_requests, -1) + self._dropped[:, None]
        return mapped.reshape(slots.shape).to(slots.dtype)


# A batch stays the same for many steps, for the draft and for the target.
batch_map = lru_cache(maxsize=8)(BatchMap)
batch_offsets = lru_cache(maxsize=8)(BatchOffsets)


def positions_of(forward_batch: Any, maps: Sequence[PositionMap | None], runner: Runner) -> torch.Tensor | None:
    """Original positions for a batch whose positions are slots; None to leave it unchanged.

    maps: as in `BatchMap`. Covers prefill, chunked prefill, prefill after a retraction, mixed batches, decoding,
    drafting and verification. Computed from host data, without a device synchronisation.
    """
    slots, mode, lengths = forward_batch.positions, forward_batch.forward_mode, forward_batch.extend_seq_lens_cpu
    if not any(maps) or slots is None or mode.is_idle():
        return None
    if runner.is_draft_worker and not draft_positions_are_mapped(runner):
        return None
    if mode.is_decode() or mode.is_target_verify():
        return batch_offsets(tuple(maps), slots.device)(slots)
    if lengths is None:
        if slots.numel() % len(maps):
            raise RuntimeError(f"{slots.numel()} positions cannot be shared evenly by {len(maps)} requests")
        lengths = [slots.numel() // len(maps)] * len(maps)
    return batch_map(tuple(maps), bool(runner.is_draft_worker), slots.device)(
        slots, [int(length) for length in lengths]
    )


@contextmanager
def slots_for_kv_lengths(forward_batch: Any, topk: int) -> Iterator[None]:
    """Replace positions by seq_lens while the draft's attention builds its index arrays.

    SGLang's Triton and FlashInfer draft backends build kv_indptr from forward_batch.positions: with original positions
    they would read KV out of range, without an error. At that moment slots and seq_lens are equal.
    """
    positions = forward_batch.positions
    forward_batch.positions = forward_batch.seq_lens.repeat_interleave(topk).to(positions.dtype)
    try:
        yield
    finally:
        forward_batch.positions = positions


def protect_kv_lengths(backend: Any, must: bool = False) -> Any:
    """Make a multi-step draft backend build its indices from lengths. Changes this object alone, and returns it.

    backend: None where no step drafts more than one token. must: it is one that takes positions for lengths; raises
    RuntimeError where SGLang has renamed its method.
    """
    build: Callable[..., Any] | None = getattr(backend, "common_template", None)
    if build is None:
        if must and backend is not None:
            raise RuntimeError(
                f"SGLang's {type(backend).__name__} has no common_template, by which its KV lengths are protected; "
                "install a tested version"
            )
        return backend

    def common_template(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        with slots_for_kv_lengths(forward_batch, backend.topk):
            return build(forward_batch, *args, **kwargs)

    backend.common_template = common_template
    return backend
