"""Where a pruned prompt's cache slots lie in the whole prompt, and the draft's KV lengths that must not follow.

SGLang knows a token by its cache slot and takes the slot for its rotary position. For a prompt of N tokens of which K
are kept, slot j stands at kept[j] while j < K, and at j + (N - K) after it: one pure map, which covers prefill, its
chunks, prefill again after a retraction, decoding, verification and drafting alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class PositionMap:
    """One pruned prompt's map from slots to original positions, for the target and for the draft.

    kept: sorted original positions (K of num_prompt_tokens). Both tables are moved to a device once.
    """

    def __init__(self, kept: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_dropped = num_prompt_tokens - len(kept)
        target = torch.tensor(kept, dtype=torch.int64)
        # SGLang's drafts hold the token after the slot's (EAGLE's shift), one position early: distances must agree.
        draft = torch.cat([target[1:] - 1, target[-1:]])
        self._tables = {False: target, True: draft}

    def __call__(self, slots: torch.Tensor, is_draft: bool) -> torch.Tensor:
        """Original positions, of the slots' shape and dtype. No synchronisation once the table is on the device."""
        table = self._tables[is_draft]
        if table.device != slots.device:
            table = self._tables[is_draft] = table.to(slots.device)
        in_prompt = table[slots.clamp(max=len(table) - 1).long()].to(slots.dtype)
        return torch.where(slots < len(table), in_prompt, slots + self.num_dropped)


def map_batch(
    slots: torch.Tensor, lengths: Sequence[int], maps: Sequence[PositionMap | None], is_draft: bool
) -> torch.Tensor:
    """Original positions of a flat batch: request i owns lengths[i] of the slots, maps[i] is None where it is whole.

    Raises RuntimeError where the lengths do not add up, since every position after would be another's.
    """
    if sum(lengths) != slots.numel():
        raise RuntimeError(f"{slots.numel()} positions for requests of {list(lengths)} tokens; nothing is mapped")
    parts = torch.split(slots, list(lengths))
    return torch.cat(
        [part if found is None else found(part, is_draft) for part, found in zip(parts, maps, strict=True)]
    )


@contextmanager
def slots_for_kv_lengths(forward_batch: Any, topk: int) -> Iterator[None]:
    """Give the draft's attention its KV lengths back while it builds its index arrays.

    SGLang's Triton and FlashInfer draft backends build kv_indptr from forward_batch.positions, taking them for
    lengths: with original positions they would read KV out of range, without an error. At that moment both are
    seq_lens, so those are what they get.
    """
    positions = forward_batch.positions
    forward_batch.positions = forward_batch.seq_lens.repeat_interleave(topk).to(positions.dtype)
    try:
        yield
    finally:
        forward_batch.positions = positions


def protect_kv_lengths(backend: Any) -> Any:
    """Make a multi-step draft backend build its indices from lengths. Changes this object alone, and returns it."""
    build: Callable[..., Any] | None = getattr(backend, "common_template", None)
    if build is None:
        return backend

    def common_template(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        with slots_for_kv_lengths(forward_batch, backend.topk):
            return build(forward_batch, *args, **kwargs)

    backend.common_template = common_template
    return backend
