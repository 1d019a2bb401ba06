"""A model, its cache and its position counter, for one request: counts in, logits out, positions explicit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from spec_stack.hf import cache as model_cache
from spec_stack.hf.architectures import text_config
from spec_stack.hf.attention import LayerCapture, attend_by_position, capture_attention
from spec_stack.hf.cache import StateSnapshot

# Tokens to recompute up to which they ride along with the next forward; more get one of their own, so that a
# snapshot can follow them.
_MAX_RIDING = 16
_MAX_SNAPSHOTS = 17


class CachedModel:
    """One request's view of a model on which `attention.install` has been called; without it transformers masks, and
    slides windows over slots, not positions.

    num_cached: tokens read and not forgotten. next_position: the position after the last of them, which is larger
    than num_cached after a sparse prefill. forward_s: seconds spent inside the model so far (on CUDA: until the
    launch returned). num_ids: width of the logits handed out, for a draft whose own are wider (the rest is cut off) or
    narrower (the rest is -inf) than the target's; None leaves them. An id it has no row for is read as its last row.

    A recurrent state cannot be cropped. For models that have one, a rollback goes back to the latest snapshot before
    the tokens that are forgotten; those after it that stay are recomputed by the next forward, ahead of its
    own tokens (num_to_recompute says how many). Their cost is therefore part of the next forward's.
    """

    def __init__(self, model: PreTrainedModel, prefill_chunk: int, num_ids: int | None = None) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.forward_s = 0.0
        self._num_rows: int = text_config(model.config).vocab_size
        self._num_ids = num_ids or self._num_rows
        self._cache = model_cache.new_cache(model.config)
        self._is_stateful = model_cache.is_stateful(self._cache)
        # What the cache holds, one entry per slot, and what it has yet to recompute.
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._to_recompute: list[tuple[int, int]] = []
        self._snapshots: list[StateSnapshot] = []

    @property
    def num_cached(self) -> int:
        return len(self._positions) + len(self._to_recompute)

    @property
    def next_position(self) -> int:
        if self._to_recompute:
            return self._to_recompute[-1][1] + 1
        return self._positions[-1] + 1 if self._positions else 0

    @property
    def num_to_recompute(self) -> int:
        return len(self._to_recompute)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Append the tokens to the cache at these positions; logits (num_logits, vocab) of the last ones.

        Long inputs run in pieces of prefill_chunk tokens (the last one holds num_logits at least). Raises
        ValueError when the positions do not go on from the cached ones.
        """
        if not len(token_ids) == len(positions) >= num_logits >= 1:
            raise ValueError(f"{len(token_ids)} tokens, {len(positions)} positions, {num_logits} logits do not fit")
        if positions[0] < self.next_position:
            raise ValueError(f"position {positions[0]} comes before the cache's next position {self.next_position}")
        started = perf_counter()
        if self._num_ids > self._num_rows:
            token_ids = [min(token_id, self._num_rows - 1) for token_id in token_ids]
        token_ids = [*(token_id for token_id, _ in self._to_recompute), *token_ids]
        positions = [*(position for _, position in self._to_recompute), *positions]
        self._to_recompute = []
        total = len(token_ids)
        # Only tokens whose logits were asked for are ever rolled back: a state is copied right before them, unless
        # so few come before them that recomputing those is cheaper than a forward of their own.
        splits = self._is_stateful and num_logits > 1 and total - num_logits > _MAX_RIDING
        with torch.inference_mode():
            start = 0
            while True:
                left = total - start
                last = left <= max(self.prefill_chunk, num_logits) and not (splits and left > num_logits)
                stop = total if last else min(start + self.prefill_chunk, total - num_logits)
                if last:
                    self._take_snapshot()
                logits = self._run(token_ids[start:stop], positions[start:stop], num_logits if last else 1)
                start = stop
                if last:
                    break
        self.forward_s += perf_counter() - started
        if self._num_ids != self._num_rows:
            # A negative pad cuts off.
            return F.pad(logits[0], (0, self._num_ids - self._num_rows), value=-torch.inf)
        return logits[0]

    def _run(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        device = self.model.device
        self._token_ids += token_ids
        self._positions += positions
        with attend_by_position(self._positions):
            output = self.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        return output.logits  # type: ignore[no-any-return]

    def _take_snapshot(self) -> None:
        num_slots = len(self._positions)
        latest = self._snapshots[-1].num_slots if self._snapshots else 0
        if self._is_stateful and num_slots > latest and len(self._snapshots) < _MAX_SNAPSHOTS:
            self._snapshots.append(StateSnapshot.take(self._cache, num_slots))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens cached tokens. Called after every step, also with 0."""
        if not 0 <= num_tokens <= self.num_cached:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_cached} cached tokens")
        num_left = self.num_cached - num_tokens
        with torch.inference_mode():
            if num_left >= len(self._positions):
                del self._to_recompute[num_left - len(self._positions) :]
            elif self._is_stateful:
                self._restore(num_left)
            else:
                model_cache.crop(self._cache, num_left)
                del self._positions[num_left:], self._token_ids[num_left:]
        del self._snapshots[:-1]

    def _restore(self, num_left: int) -> None:
        """Go back to the latest state that has read no more than num_left tokens, at worst to none; the next forward
        recomputes the tokens between."""
        while self._snapshots and self._snapshots[-1].num_slots > num_left:
            self._snapshots.pop()
        num_slots = self._snapshots[-1].num_slots if self._snapshots else 0
        if self._snapshots:
            self._snapshots[-1].restore(self._cache)
        else:
            self._cache = model_cache.new_cache(self.model.config)
        self._to_recompute = list(
            zip(self._token_ids[num_slots:num_left], self._positions[num_slots:num_left], strict=True)
        )
        del self._positions[num_slots:], self._token_ids[num_slots:]

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep only these cache slots, given in increasing order; their positions stay as they were.

        A recurrent state cannot forget single tokens: a model that has one keeps its whole context.
        """
        if self._is_stateful or len(slots) == self.num_cached:
            return
        with torch.inference_mode():
            model_cache.keep_slots(self._cache, slots, self.model.device)
        self._positions = [self._positions[slot] for slot in slots]
        self._token_ids = [self._token_ids[slot] for slot in slots]

    def capture(self) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture the queries and keys of every forward inside the block, by layer."""
        return capture_attention()
