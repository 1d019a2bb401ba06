"""Original positions for SGLang's batches of pruned requests. No SGLang import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spec_stack.sglang.positions import PositionMap, batch_map, batch_offsets
from spec_stack.sglang.protocols import Runner, RunningRequest
from spec_stack.sglang.request_state import STATE
from spec_stack.sglang.support import draft_positions_are_mapped


def positions_of(forward_batch: Any, requests: Sequence[RunningRequest], runner: Runner) -> torch.Tensor | None:
    """Original positions for a batch whose positions are slots; None to leave it unchanged.

    Covers prefill, chunked prefill, prefill after a retraction, mixed batches, decoding, drafting and verification.
    Computed from host data, without a device synchronisation.
    """
    maps = _maps(requests)
    if not _is_mapped(maps, forward_batch, runner):
        return None
    is_draft = bool(runner.is_draft_worker)
    slots, mode, lengths = forward_batch.positions, forward_batch.forward_mode, forward_batch.extend_seq_lens_cpu
    if mode.is_decode() or mode.is_target_verify():
        return batch_offsets(tuple(maps), slots.device)(slots)
    if lengths is None:
        if slots.numel() % len(maps):
            raise RuntimeError(f"{slots.numel()} positions cannot be shared evenly by {len(maps)} requests")
        lengths = [slots.numel() // len(maps)] * len(maps)
    return batch_map(tuple(maps), is_draft, slots.device)(slots, [int(length) for length in lengths])


def positions_one_by_one(forward_batch: Any, requests: Sequence[RunningRequest], runner: Runner) -> torch.Tensor | None:
    """The fallback of `positions_of`, slot by slot on the host; waits for the device."""
    maps = _maps(requests)
    if not _is_mapped(maps, forward_batch, runner):
        return None
    slots = forward_batch.positions
    lengths = forward_batch.extend_seq_lens_cpu
    mode = forward_batch.forward_mode
    if mode.is_decode() or mode.is_target_verify() or lengths is None:
        lengths = [slots.numel() // len(maps)] * len(maps)
    if sum(lengths) != slots.numel():
        raise RuntimeError(f"{slots.numel()} positions cannot be shared out among {len(maps)} requests")
    remaining = iter(slots.flatten().tolist())
    mapped: list[int] = []
    for placed, length in zip(maps, lengths, strict=True):
        for _ in range(length):
            slot = next(remaining)
            mapped.append(slot if placed is None else _position(placed, slot, bool(runner.is_draft_worker)))
    return torch.tensor(mapped, dtype=slots.dtype, device=slots.device).reshape(slots.shape)


def _position(placed: PositionMap, slot: int, is_draft: bool) -> int:
    table = placed.draft if is_draft else placed.target
    return int(table[slot]) if slot < len(table) else slot + placed.num_dropped


def _maps(requests: Sequence[RunningRequest]) -> list[PositionMap | None]:
    return [getattr(getattr(request, STATE, None), "positions", None) for request in requests or ()]


def _is_mapped(maps: Sequence[PositionMap | None], forward_batch: Any, runner: Runner) -> bool:
    if not any(maps) or forward_batch.positions is None or forward_batch.forward_mode.is_idle():
        return False
    return not runner.is_draft_worker or draft_positions_are_mapped(runner)
