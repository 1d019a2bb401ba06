"""Original positions of a pruned prompt's KV slots, in every kind of batch and in radix keys.

Slot j of K kept of N tokens is at kept[j] while j < K, else at j + (N - K). Draft KV lengths stay slot counts. The
radix key of the token in slot j is id + (position - j) * 2**32, the plain id until something was dropped: equal keys
mean equal KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from spec_stack.devices import to_device
from spec_stack.sglang.required_api import Runner
from spec_stack.sglang.support import draft_positions_are_mapped

_KEY_SHIFT = 32


class PositionMap:
    """One pruned prompt's map from slots to original positions, for the target and for the draft.

    kept: (K,) in the order of the slots; the last one is the prompt's last.
    """

    def __init__(self, kept: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_dropped = num_prompt_tokens - len(kept)
        self.target = torch.tensor(kept, dtype=torch.int64)
        # SGLang's drafts hold the token after the slot's (EAGLE's shift), one position early: distances must agree.
        self.draft = torch.cat([(self.target[1:] - 1).clamp(min=0), self.target[-1:]])


class BatchMap:
    """The maps of a batch as four tensors; None for a dense request. A step costs a few kernels at any batch size."""

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
        """Original positions of a flat batch whose request i has lengths[i] of the slots; their shape and dtype."""
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


# A batch stays the same for many steps, for the draft and for the target.
batch_map = lru_cache(maxsize=8)(BatchMap)


def positions_of(forward_batch: Any, maps: Sequence[PositionMap | None], runner: Runner) -> torch.Tensor | None:
    """Original positions for a batch whose positions are slots, without a synchronisation; None changes nothing."""
    slots, mode, lengths = forward_batch.positions, forward_batch.forward_mode, forward_batch.extend_seq_lens_cpu
    if not any(maps) or slots is None or mode.is_idle():
        return None
    if runner.is_draft_worker and not draft_positions_are_mapped(runner):
        return None
    if mode.is_decode() or mode.is_target_verify() or lengths is None:
        # A remainder does not add up, and is refused below.
        lengths = [slots.numel() // len(maps)] * len(maps)
    mapped = batch_map(tuple(maps), bool(runner.is_draft_worker), slots.device)
    return mapped(slots, [int(length) for length in lengths])


class PositionedRadixKey(str):
    """A pruned request's extra_key, which carries the position map to wherever SGLang makes a key of the request.

    namespace is the client's own extra_key, unchanged in the key, so tenants stay separated.
    """

    namespace: str | None
    _moved: np.ndarray[Any, np.dtype[np.int64]]
    _moved_after: int

    @classmethod
    def of(cls, positions: PositionMap, namespace: str | None) -> PositionedRadixKey:
        key = cls("placed by spec_stack")
        key.namespace = namespace
        kept = positions.target.numpy()
        key._moved = (kept - np.arange(len(kept))) << _KEY_SHIFT
        key._moved_after = positions.num_dropped << _KEY_SHIFT
        return key

    def place(self, token_ids: Sequence[int]) -> array[int]:
        """The request's tokens from the first one on, as the key holds them."""
        ids = np.array(token_ids, dtype=np.int64)
        num_kept = min(len(ids), len(self._moved))
        ids[:num_kept] += self._moved[:num_kept]
        ids[num_kept:] += self._moved_after
        return array("q", ids.tobytes())


def encode_positions(
    init: Callable[..., None], key: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Wraps `RadixKey.__init__`. Slices of a key have the plain namespace, so nothing is placed twice."""
    if isinstance(extra_key, PositionedRadixKey):
        token_ids, extra_key = extra_key.place(token_ids), extra_key.namespace
    init(key, token_ids, extra_key, *args, **kwargs)


def protect_kv_lengths(backend: Any, must: bool = False) -> Any:
    """Make a multi-step draft backend build its indices from lengths, which are the slots then. Mutates and returns it.

    SGLang's Triton and FlashInfer draft backends build kv_indptr from forward_batch.positions: with original positions
    they would read KV out of range, without an error.

    backend: None where no step drafts more than one token. must: it is one that takes positions for lengths.
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
        positions = forward_batch.positions
        forward_batch.positions = forward_batch.seq_lens.repeat_interleave(backend.topk).to(positions.dtype)
        try:
            return build(forward_batch, *args, **kwargs)
        finally:
            forward_batch.positions = positions

    backend.common_template = common_template
    return backend
