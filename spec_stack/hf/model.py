"""One request's model view: cache and position counter."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from spec_stack.devices import to_device
from spec_stack.hf import cache as model_cache
from spec_stack.hf.architectures import text_config
from spec_stack.hf.attention import LayerCapture, attend_by_position, capture_attention, is_capturing
from spec_stack.hf.early_layers import EarlyLayers
from spec_stack.hf.fixed_step import WIDTHS, FixedCache, FixedStep, padded
from spec_stack.hf.slots import KeysCached, RecalledSlots, SlotPositions

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

# Most tokens recomputed together with the next forward; more get a forward of their own and a snapshot.
_MAX_RIDING = 16
# Longest piece on a CPU: longer ones are no faster, and progress and cancellation wait for seconds.
_CPU_PIECE = 2048
# Tokens without logits that gain on a CPU by a forward of their own, which ends at the last layer's keys.
_CPU_APART = 512


def piece_ends(num_tokens: int, num_logits: int, chunk: int, own_piece: bool) -> list[int]:
    """End indices of pieces of at most `chunk` tokens; the last num_logits stay in one, on their own if own_piece."""
    ends, at = [], 0
    while num_tokens - at > (num_logits if own_piece else max(chunk, num_logits)):
        at = min(at + chunk, num_tokens - num_logits)
        ends.append(at)
    return [*ends, num_tokens]


class CachedModel:
    """One request's view of a shared model, which needs `attention.install` for windows by position.

    prefill_chunk: most tokens per piece. num_ids: logits width where it is not the model's own; wider logits are cut,
    narrower ones padded with -inf. step: runs forwards of a few tokens in fixed shapes. on_piece: called at every
    attention layer with a piece's tokens and its share of finished layers; its exception aborts the forward, and the
    cache keeps the finished pieces. A recurrent state cannot be cropped: a rollback restores the latest snapshot before
    it, and the next forward recomputes the tokens behind.
    """

    def __init__(
        self, model: PreTrainedModel, prefill_chunk: int, num_ids: int | None = None, step: FixedStep | None = None
    ) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self._step = step
        # Whether fixed forwards have moved on from the slots that the layers show.
        self._is_ahead = False
        self.on_piece: Callable[[int, float], None] | None = None
        self._most_in_piece = min(prefill_chunk, _CPU_PIECE) if model.device.type == "cpu" else prefill_chunk
        self._num_ids = num_ids
        self._cache = model_cache.new_cache(model.config)
        self._last_layer = model_cache.last_attention_layer(self._cache)
        # Of the cached tokens in slot order; the last num_to_recompute have no slot.
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.num_to_recompute = 0
        # End of the slots with recalled positions; positions increase from there on.
        self._recalled_end = 0
        # After a prefill of the first layers alone: what the next forward of all layers goes on from.
        self._early: EarlyLayers | None = None

    @property
    def _cache(self) -> DynamicCache:
        """The cache, for forwards of any shape."""
        self._settle()
        return self._layers

    @_cache.setter
    def _cache(self, cache: DynamicCache) -> None:
        self._layers = cache
        is_stateful = any([hasattr(layer, "recurrent_states") for layer in cache.layers])
        self._states = model_cache.States(cache) if is_stateful else None
        self._fixed: FixedCache | None = None
        self._is_ahead = False
        self._early = None

    def _settle(self) -> None:
        """Let the layers show what fixed forwards wrote."""
        if self._is_ahead:
            with torch.inference_mode():
                model_cache.show(self._layers, len(self.positions))
            self._is_ahead = False

    @property
    def num_cached(self) -> int:
        """Tokens in the cache, after rollbacks."""
        return len(self.positions)

    @property
    def next_position(self) -> int:
        """The largest cached position plus 1; exceeds num_cached after a sparse prefill."""
        if len(self.positions) > self._recalled_end:
            return self.positions[-1] + 1
        return max(self.positions, default=-1) + 1

    def draft_lag(self, num_tokens: int) -> int:
        """Tokens to run before a text of this length is cached: the new ones, and cached ones without keys. Those whose
        late layers alone are missing count as that share of them."""
        share = 0.0 if self._early is None else self._early.share
        return num_tokens - self.next_position + self.num_to_recompute + round(share * self.num_cached)

    @property
    def can_recall(self) -> bool:
        """Whether tokens may be inserted before cached positions: not with a recurrent state."""
        return not self.is_stateful

    @property
    def num_layers(self) -> int:
        return len(self._cache.layers)

    @property
    def is_stateful(self) -> bool:
        """Whether the model has a recurrent state, which cannot be cropped."""
        return self._states is not None

    def truncate(self, position: int) -> None:
        """Drop all tokens from a position on. No other token has attended to them."""
        if self.next_position > position:
            kept = [slot for slot, at in enumerate(self.positions) if at < position]
            self.rollback(self.num_cached - (kept[-1] + 1 if kept else 0))
            self.keep_slots(kept)

    def fork(self) -> CachedModel:
        """A view with the same tokens, copied on write (recurrent states at once)."""
        other = type(self)(self.model, self.prefill_chunk, self._num_ids, self._step)
        with torch.inference_mode():
            other._cache = model_cache.fork(self._cache)
        other.positions, other.token_ids = list(self.positions), list(self.token_ids)
        other.num_to_recompute, other._recalled_end = self.num_to_recompute, self._recalled_end
        other._early = self._early and self._early.fork()
        return other

    def release(self) -> None:
        """Free what a request captured; the next one captures its own."""
        self._settle()
        self._fixed = None

    def contents(self) -> dict[str, torch.Tensor]:
        """The cache as tensors for `filled`. Not copied."""
        slots = {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.long),
            "positions": torch.tensor(self.positions, dtype=torch.long),
            "num_to_recompute": torch.tensor([self.num_to_recompute]),
            "recalled_end": torch.tensor([self._recalled_end]),
        }
        return slots | model_cache.contents(self._cache)

    def filled(self, contents: Mapping[str, torch.Tensor]) -> CachedModel:
        """A view of the same model with these contents."""
        other = type(self)(self.model, self.prefill_chunk, self._num_ids, self._step)
        other.token_ids, other.positions = contents["token_ids"].tolist(), contents["positions"].tolist()
        other.num_to_recompute, other._recalled_end = (
            int(contents[name]) for name in ("num_to_recompute", "recalled_end")
        )
        with torch.inference_mode():
            model_cache.fill(other._cache, contents, self.model.device)
        return other

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Append tokens in pieces of prefill_chunk; logits (num_logits, vocab). Positions increase; recalled tokens, at
        uncached earlier positions, may precede them. Raises ValueError for invalid ones, before any change."""
        if num_logits < 1:
            raise ValueError(f"{num_logits} logits do not fit; `prefill` gives none")
        if self._early is not None:
            self._resume(self._early)
        if self.num_to_recompute > _MAX_RIDING:
            self.prefill(*self._pop_pending())
        token_ids, positions = self._take(token_ids, positions, num_logits)
        # Only tokens with logits are rolled back, so a state is copied right before them.
        num_before = len(token_ids) - num_logits
        own_piece = num_logits > 1 and num_before > _MAX_RIDING and self.is_stateful
        if self._last_layer is not None and self.model.device.type == "cpu":
            own_piece = own_piece or num_before >= _CPU_APART
        ends = piece_ends(len(token_ids), num_logits, self._most_in_piece, own_piece)
        *earlier, (start, end) = pairwise([0, *ends])
        with torch.inference_mode():
            for first, last in earlier:
                self._run(token_ids[first:last], positions[first:last], last_layer=self._last_layer)
            if self._states is not None:
                self._states.take(len(self.positions))
            logits = self._run_last(token_ids[start:end], positions[start:end], num_logits)
        if self._num_ids is not None:
            # A negative pad crops.
            logits = F.pad(logits, (0, self._num_ids - logits.shape[-1]), value=-torch.inf)
        return logits

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """Append tokens without logits. window: each attends to so many positions and to those below num_sinks.
        num_layers: run only so many layers, from the first call on an empty cache to the last; the next forward of all
        layers runs the others over what is cached by then."""
        last_layer, model = self._last_layer, self.model
        if num_layers is not None:
            last_layer = model_cache.last_scoring_layer(self._cache, num_layers)
            self._early = self._early or EarlyLayers(self.model, last_layer)
            model = self._early.first()
        elif self._early is not None:
            self._resume(self._early)
        token_ids, positions = self._take(token_ids, positions, 0)
        ends = piece_ends(len(token_ids), 0, self._most_in_piece, own_piece=False)
        with torch.inference_mode():
            for first, last in pairwise([0, *ends]):
                self._run(token_ids[first:last], positions[first:last], 1, window, num_sinks, last_layer, model)

    def _resume(self, early: EarlyLayers) -> None:
        """Run the layers that a prefill of the first layers left out, over the cached tokens alone."""
        self._early = None
        if not early.can_resume:
            self._read_again(range(self.num_cached))
            return
        try:
            with torch.inference_mode():
                # The last of the first layers cached keys, but attended to nothing.
                model_cache.crop(self._cache, 0, early.end)
                for first, last in pairwise([0, *piece_ends(self.num_cached, 0, self._most_in_piece, own_piece=False)]):
                    slots = SlotPositions(self.positions[:last], last_layer=self._last_layer)
                    piece = self.token_ids[first:last], self.positions[first:last]
                    with suppress(KeysCached):
                        self._call(*piece, slots, 1, early.rest(first, last))
        except BaseException:
            # Whoever goes on computes all layers anew.
            self._read_again(range(self.num_cached))
            raise

    def _read_again(self, slots: Sequence[int]) -> None:
        """Keep the tokens of these slots, which the next forward computes."""
        texts = dict(zip(self.positions, self.token_ids, strict=True))
        self.reset_to(texts, [self.positions[slot] for slot in slots])

    def _numbered(self, positions: Sequence[int]) -> Sequence[int]:
        """The positions that the model gets for those of the next tokens."""
        return positions

    def _open_fixed(self, num_tokens: int) -> FixedCache | None:
        """The bucket for a fixed forward of num_tokens; None where it has to be eager."""
        if self._step is None or self._step.why_eager or num_tokens > WIDTHS[-1] or not self.positions:
            return None
        # A fixed forward masks by slot, and recalled tokens by position.
        if self.on_piece is not None or is_capturing() or self._recalled_end > len(self.positions):
            return None
        num_slots = len(self.positions) + padded(num_tokens)
        if self._fixed is None or not self._is_ahead or num_slots > self._fixed.num_slots:
            with torch.inference_mode():
                keys, values = model_cache.reserve(self._cache, num_slots)
            if self._fixed is None or keys[0] is not self._fixed.keys[0]:
                self._fixed = FixedCache(self._step, keys, values)
        self._is_ahead = True
        return self._fixed

    def _pop_pending(self) -> tuple[list[int], list[int]]:
        """Remove the tokens that have no slot: ids and positions."""
        num_slots = len(self.positions) - self.num_to_recompute
        pending = self.token_ids[num_slots:], self.positions[num_slots:]
        del self.token_ids[num_slots:], self.positions[num_slots:]
        self.num_to_recompute = 0
        return pending

    def _take(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> tuple[list[int], list[int]]:
        """Prepend the tokens to be recomputed."""
        if not (len(token_ids) == len(positions) >= num_logits and token_ids):
            raise ValueError(f"{len(token_ids)} tokens, {len(positions)} positions, {num_logits} logits do not fit")
        if positions[0] < self.next_position:
            self._mark_recalled(positions)
        if self._num_ids is not None:
            last_id = text_config(self.model.config).vocab_size - 1
            token_ids = [min(token_id, last_id) for token_id in token_ids]
        pending_ids, pending_positions = self._pop_pending()
        return [*pending_ids, *token_ids], [*pending_positions, *positions]

    def _mark_recalled(self, positions: Sequence[int]) -> None:
        """Check recalled tokens, before next_position, and store where they end."""
        num_recalled = bisect_left(positions, self.next_position)
        if num_recalled == len(positions) or not self.can_recall:
            raise ValueError(f"position {positions[0]} comes before the cache's next position {self.next_position}")
        if not set(self.positions).isdisjoint(positions[:num_recalled]):
            raise ValueError("some of the positions to recall are cached already")
        self._recalled_end = len(self.positions) + num_recalled

    def _open_slots(self, window: int | None, num_sinks: int, last_layer: int | None) -> SlotPositions:
        if self._recalled_end:
            return RecalledSlots(self.positions, window, num_sinks, last_layer, self._recalled_end)
        return SlotPositions(self.positions, window, num_sinks, last_layer)

    def _run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        num_logits: int = 1,
        window: int | None = None,
        num_sinks: int = 0,
        last_layer: int | None = None,
        model: PreTrainedModel | None = None,
    ) -> torch.Tensor:
        """One eager forward; logits (num_logits, rows), none where it ends at an attention layer's keys. model: other
        than the own one."""
        num_whole, cache = len(self.positions), self._cache
        self.token_ids += token_ids
        self.positions += positions
        slots = self._open_slots(window, num_sinks, last_layer)
        logits = torch.empty(0)
        try:
            with suppress(KeysCached):
                logits = self._call(token_ids, positions, slots, num_logits, model or self.model)
        except BaseException:
            if not self.is_stateful:
                model_cache.crop(cache, num_whole)
                if self._early is not None:
                    self._early.crop(num_whole)
                del self.positions[num_whole:], self.token_ids[num_whole:]
            raise
        if self.on_piece is not None:
            self.on_piece(len(token_ids), 1.0)
        return logits

    def _run_last(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """A forward with logits (num_logits, rows), in fixed shapes where possible."""
        fixed = self._open_fixed(len(token_ids))
        logits = None if fixed is None else fixed.forward(token_ids, self._numbered(positions), len(self.positions))
        if logits is None:
            return self._run(token_ids, positions, num_logits)
        self.token_ids += token_ids
        self.positions += positions
        return logits[-num_logits:]

    def _call(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: SlotPositions,
        num_logits: int,
        model: PreTrainedModel,
    ) -> torch.Tensor:
        device = self.model.device
        slots.on_piece = self.on_piece
        slots.num_layers = self.num_layers if slots.last_layer is None else slots.last_layer + 1
        with attend_by_position(slots):
            output = model(
                input_ids=to_device(torch.tensor([token_ids]), device),
                position_ids=to_device(torch.tensor([positions]), device),
                use_cache=True,
                logits_to_keep=num_logits,
                **model_cache.cache_argument(self.model, self._cache),
            )
        return output.logits[0]  # type: ignore[no-any-return]

    def checkpoint(self) -> None:
        """Snapshot a recurrent state, so that a rollback to here recomputes nothing; a no-op otherwise."""
        if self.num_to_recompute > _MAX_RIDING:
            self.prefill(*self._pop_pending())
        if self._states is not None:
            self._states.take(self.num_cached - self.num_to_recompute)

    def rollback(self, num_tokens: int) -> None:
        """Drop the last num_tokens cached tokens. Called after every step, also with 0."""
        if not 0 <= num_tokens <= self.num_cached:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_cached} cached tokens")
        num_slots = self.num_cached - self.num_to_recompute
        num_left = self.num_cached - num_tokens
        if num_left < num_slots and self._states is not None:
            # The latest snapshot of at most num_left tokens; the rest is recomputed.
            with torch.inference_mode():
                num_slots = self._states.restore(num_left)
            if not num_slots:
                self._cache = model_cache.new_cache(self.model.config)
        elif num_left < num_slots and not self._is_ahead:
            with torch.inference_mode():
                model_cache.crop(self._cache, num_left)
                if self._early is not None:
                    self._early.crop(num_left)
        del self.positions[num_left:], self.token_ids[num_left:]
        self.num_to_recompute = max(0, num_left - num_slots)
        if self._states is not None:
            self._states.keep_latest()

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep only these cache slots, with their positions. A model with a recurrent state keeps its whole context,
        unless its late layers have not seen it."""
        if self._early is not None and not self._early.can_resume:
            self._read_again(slots)
        if self.is_stateful or len(slots) == self.num_cached:
            return
        with torch.inference_mode():
            model_cache.keep_slots(self._cache, slots, self.model.device)
            if self._early is not None:
                self._early.keep_slots(slots)
        self._recalled_end = len(slots) if self._recalled_end else 0
        self.positions = [self.positions[slot] for slot in slots]
        self.token_ids = [self.token_ids[slot] for slot in slots]

    def reset_to(self, prompt_ids: Sequence[int] | Mapping[int, int], positions: Sequence[int]) -> None:
        """Reset the cache to the prompt's tokens at these increasing positions; the next forward computes them."""
        self._cache = model_cache.new_cache(self.model.config)
        self.token_ids, self.positions = [prompt_ids[position] for position in positions], list(positions)
        self.num_to_recompute, self._recalled_end = len(positions), 0

    def capture(self, first: int = 0) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture keys, and queries from position `first` on, of every forward inside the block, by layer."""
        return capture_attention(first)
