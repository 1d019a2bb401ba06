"""A model with its cache and its position counter, for one request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from spec_stack.hf import cache as model_cache
from spec_stack.hf.architectures import text_config
from spec_stack.hf.attention import LayerCapture, attend_by_position, capture_attention
from spec_stack.hf.slots import KeysCached, RestoredSlots, SlotPositions
from spec_stack.hf.states import States

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens to recompute up to which they ride along with the next forward; more get one of their own, so that a
# snapshot can follow them.
_MAX_RIDING = 16
# Most tokens in a piece on a CPU, where a longer one is no faster and its caller waits for seconds.
_CPU_PIECE = 2048
# Tokens without logits from which the last layer leaves them out.
_MIN_NARROWED = 64


def piece_ends(num_tokens: int, num_logits: int, chunk: int, own_piece: bool) -> list[int]:
    """Where the pieces of a long forward end.

    The last num_logits tokens stay together (in a piece of their own, if own_piece); no other piece is longer than
    chunk.
    """
    ends, at = [], 0
    while num_tokens - at > (num_logits if own_piece else max(chunk, num_logits)):
        at = min(at + chunk, num_tokens - num_logits)
        ends.append(at)
    return [*ends, num_tokens]


class CachedModel:
    """One request's view of a model on which `attention.install` has been called.

    The model is shared and never changed. Without `attention.install`, windows would slide over slots, not positions.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    prefill_chunk : int
        Most tokens in one piece of a long forward (2,048 at most on a CPU).
    num_ids : int, optional
        Width of the logits, for a draft whose own are wider (the rest is cut off) or narrower (the rest is -inf) than
        the target's. An id without a row in the model is taken as its last row.

    Attributes
    ----------
    forward_s
        Seconds inside the model so far (on CUDA: until the launch returned).
    on_piece
        Called with a piece's tokens and the share of its layers that is done, at every attention layer, and with 1.0
        after it. An exception of it ends the forward; the cache then holds the whole pieces before (of a model with a
        state: undefined).

    Notes
    -----
    A recurrent state cannot be cropped. A rollback goes back to the latest snapshot before the forgotten tokens; those
    after it that stay are recomputed by the next forward, ahead of its own tokens (`num_to_recompute`).
    """

    def __init__(self, model: PreTrainedModel, prefill_chunk: int, num_ids: int | None = None) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.forward_s = 0.0
        self.on_piece: Callable[[int, float], None] | None = None
        self._most_in_piece = min(prefill_chunk, _CPU_PIECE) if model.device.type == "cpu" else prefill_chunk
        self._num_rows: int = text_config(model.config).vocab_size
        self._num_ids = num_ids or self._num_rows
        self._cache = model_cache.new_cache(model.config)
        self._states = States(self._cache)
        self._last_layer = model_cache.last_attention_layer(self._cache)
        # One entry per slot, and the tokens that are still to be recomputed.
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._to_recompute: list[tuple[int, int]] = []
        # Slots up to the end of the last ones that went back to an earlier position; from there on positions increase.
        self._restored_end = 0

    @property
    def num_cached(self) -> int:
        """Tokens prefilled or decoded and not forgotten."""
        return len(self._positions) + len(self._to_recompute)

    @property
    def next_position(self) -> int:
        """The position after the largest cached one: more than num_cached after a sparse prefill."""
        if self._to_recompute:
            return self._to_recompute[-1][1] + 1
        if len(self._positions) > self._restored_end:
            return self._positions[-1] + 1
        return max(self._positions, default=-1) + 1

    def num_unread(self, num_tokens: int) -> int:
        """How many tokens it has to take in to have caught up with a text of so many."""
        return num_tokens - self.next_position

    @property
    def positions(self) -> Sequence[int]:
        """Those of the cached tokens, in the order in which they were written."""
        return [*self._positions, *(position for _, position in self._to_recompute)]

    @property
    def token_ids(self) -> Sequence[int]:
        """The cached tokens, in the order in which they were written."""
        return [*self._token_ids, *(token_id for token_id, _ in self._to_recompute)]

    @property
    def num_to_recompute(self) -> int:
        return len(self._to_recompute)

    @property
    def can_restore(self) -> bool:
        """Whether tokens may come in at positions before those of cached ones: no state has gone past them."""
        return not self.is_stateful

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._cache.layers)

    @property
    def is_stateful(self) -> bool:
        """Whether there is a recurrent state, which cannot be cropped."""
        return self._states.exist

    def forget_from(self, position: int) -> None:
        """Forget all tokens from the first one written at or past a position on.

        What was restored after that one goes too: it has seen it.
        """
        if self.next_position > position:
            held = self.positions
            first = next(slot for slot, at in enumerate(held) if at >= position)
            self.rollback(len(held) - first)

    def fork(self) -> CachedModel:
        """Another view with the same tokens. Nothing is copied until one of the two goes on (states are, at once)."""
        other = type(self)(self.model, self.prefill_chunk, self._num_ids)
        with torch.inference_mode():
            other._cache = model_cache.fork(self._cache)
        other._states = States(other._cache)
        other._positions, other._token_ids = list(self._positions), list(self._token_ids)
        other._to_recompute, other._restored_end = list(self._to_recompute), self._restored_end
        return other

    def compact(self) -> None:
        """Give up the memory that is set aside for tokens to come: for a cache that is put away."""
        with torch.inference_mode():
            model_cache.compact(self._cache)

    def contents(self) -> dict[str, torch.Tensor]:
        """The cache as tensors that `filled` takes. Not copied."""
        slots = {
            "token_ids": torch.tensor(self._token_ids, dtype=torch.long),
            "positions": torch.tensor(self._positions, dtype=torch.long),
            "to_recompute": torch.tensor(self._to_recompute, dtype=torch.long).reshape(-1, 2),
            "restored_end": torch.tensor([self._restored_end]),
        }
        return slots | {f"cache.{name}": tensor for name, tensor in model_cache.contents(self._cache).items()}

    def filled(self, contents: Mapping[str, torch.Tensor]) -> CachedModel:
        """Another view of the same model with these contents. Raises ValueError where they are another model's."""
        other = type(self)(self.model, self.prefill_chunk, self._num_ids)
        try:
            other._token_ids = contents["token_ids"].tolist()
            other._positions = contents["positions"].tolist()
            other._to_recompute = [(token_id, position) for token_id, position in contents["to_recompute"].tolist()]
            other._restored_end = int(contents["restored_end"])
            cached = {
                name.removeprefix("cache."): tensor.to(self.model.device)
                for name, tensor in contents.items()
                if name.startswith("cache.")
            }
            with torch.inference_mode():
                model_cache.fill(other._cache, cached)
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"it is not a cache of this model: {error}") from error
        num_slots = model_cache.num_slots(other._cache)
        if len(other._token_ids) != len(other._positions) or num_slots not in (None, len(other._positions)):
            raise ValueError(f"it holds {len(other._positions)} positions for {num_slots} slots")
        return other

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Append tokens to the cache, in pieces of prefill_chunk where they are many; logits (num_logits, vocab).

        Positions increase strictly and begin at next_position or after it. Restored tokens, at increasing positions
        before that which are not cached, may come ahead of them: every token sees all that were written before it (a
        sliding window counts both ways). Raises ValueError where counts or positions do not fit; the cache is then
        unchanged.
        """
        if num_logits < 1:
            raise ValueError(f"{num_logits} logits do not fit; `prefill` gives none")
        self._catch_up()
        started = perf_counter()
        token_ids, positions = self._take(token_ids, positions, num_logits)
        # Only tokens with logits are ever rolled back: a state is copied right before them, unless so few come before
        # them that recomputing those is cheaper than a forward of their own.
        own_piece = self.is_stateful and num_logits > 1 and len(token_ids) - num_logits > _MAX_RIDING
        ends = piece_ends(len(token_ids), num_logits, self._most_in_piece, own_piece)
        *earlier, (start, end) = pairwise([0, *ends])
        with torch.inference_mode():
            for first, last in earlier:
                self._cache_keys(token_ids[first:last], positions[first:last], self._last_layer)
            self._states.take(len(self._positions))
            logits = self._run(token_ids[start:end], positions[start:end], num_logits)
        self.forward_s += perf_counter() - started
        return self._widen(logits)

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """Append tokens to the cache without logits, which costs less than `forward`.

        Under a window each token sees the window's positions up to itself and the positions below num_sinks; layers
        with a window of their own keep the smaller one. What comes later sees everything again. num_layers: run only
        so many layers (as far as the first attention layer at least); the cache is then good for scoring alone, until
        `prefill_kept`.
        """
        started = perf_counter()
        token_ids, positions = self._take(token_ids, positions, 0)
        last_layer = self._last_layer
        if num_layers is not None:
            last_layer = model_cache.last_scoring_layer(self._cache, num_layers)
        ends = piece_ends(len(token_ids), 0, self._most_in_piece, own_piece=False)
        with torch.inference_mode():
            for first, last in pairwise([0, *ends]):
                self._cache_keys(token_ids[first:last], positions[first:last], last_layer, window, num_sinks)
        self.forward_s += perf_counter() - started

    def _catch_up(self) -> None:
        """Recompute tokens that are too many to ride along with others."""
        if len(self._to_recompute) > _MAX_RIDING:
            token_ids, positions = zip(*self._to_recompute, strict=True)
            self._to_recompute = []
            self.prefill(token_ids, positions)

    def _take(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> tuple[list[int], list[int]]:
        """These tokens and positions with those to recompute before them."""
        if not (len(token_ids) == len(positions) >= num_logits and token_ids):
            raise ValueError(f"{len(token_ids)} tokens, {len(positions)} positions, {num_logits} logits do not fit")
        if positions[0] < self.next_position:
            self._mark_restored(positions)
        if self._num_ids > self._num_rows:
            token_ids = [min(token_id, self._num_rows - 1) for token_id in token_ids]
        taken = (
            [*(token_id for token_id, _ in self._to_recompute), *token_ids],
            [*(position for _, position in self._to_recompute), *positions],
        )
        self._to_recompute = []
        return taken

    def _mark_restored(self, positions: Sequence[int]) -> None:
        """Check the tokens of a forward that go back before next_position, and remember where they end."""
        num_restored = bisect_left(positions, self.next_position)
        if num_restored == len(positions) or not self.can_restore:
            raise ValueError(f"position {positions[0]} comes before the cache's next position {self.next_position}")
        if not set(self._positions).isdisjoint(positions[:num_restored]):
            raise ValueError("some of the positions to restore are cached already")
        self._restored_end = len(self._positions) + num_restored

    def _open_slots(
        self, window: int | None = None, num_sinks: int = 0, last_layer: int | None = None
    ) -> SlotPositions:
        kind = RestoredSlots if self._restored_end else SlotPositions
        return kind(self._positions, window, num_sinks, last_layer)

    def _cache_keys(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        last_layer: int | None,
        window: int | None = None,
        num_sinks: int = 0,
    ) -> None:
        """One forward of the model up to that attention layer's keys and values; to its end where there is none."""
        with self._piece(token_ids, positions):
            slots = self._open_slots(window, num_sinks, last_layer)
            with suppress(KeysCached):
                self._call(token_ids, positions, slots, num_logits=1)
        if self.on_piece is not None:
            self.on_piece(len(token_ids), 1.0)

    def _run(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """One forward of the model; logits (num_logits, rows)."""
        with self._piece(token_ids, positions):
            slots = self._open_slots()
            if self._last_layer is not None and len(token_ids) - num_logits >= _MIN_NARROWED:
                slots.narrow_layer, slots.num_wanted = self._last_layer, num_logits
            logits = self._call(token_ids, positions, slots, num_logits)
        if self.on_piece is not None:
            self.on_piece(len(token_ids), 1.0)
        return logits

    @contextmanager
    def _piece(self, token_ids: Sequence[int], positions: Sequence[int]) -> Iterator[None]:
        """Count the tokens of a forward as cached; where it ends early, drop what some of its layers have cached."""
        num_whole = len(self._positions)
        self._token_ids += token_ids
        self._positions += positions
        try:
            yield
        except BaseException:
            if not self.is_stateful:
                model_cache.crop(self._cache, num_whole)
                del self._positions[num_whole:], self._token_ids[num_whole:]
            raise

    def _call(
        self, token_ids: Sequence[int], positions: Sequence[int], slots: SlotPositions, num_logits: int
    ) -> torch.Tensor:
        device = self.model.device
        on_piece = self.on_piece
        if on_piece is not None:
            num_layers = len(self._cache.layers) if slots.last_layer is None else slots.last_layer + 1
            slots.on_layer = lambda index: on_piece(len(token_ids), index / num_layers)
        with attend_by_position(slots):
            output = self.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=True,
                logits_to_keep=num_logits,
                **model_cache.cache_argument(self.model, self._cache),
            )
        return output.logits[0]  # type: ignore[no-any-return]

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (…, rows) at the width asked for, (…, num_ids)."""
        if self._num_ids == self._num_rows:
            return logits
        # A negative pad cuts off.
        return F.pad(logits, (0, self._num_ids - self._num_rows), value=-torch.inf)

    def checkpoint(self) -> None:
        """Hold a recurrent state as it is now, so that a rollback to here recomputes nothing. Others need none."""
        self._catch_up()
        self._states.take(len(self._positions))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens cached tokens. Called after every step, also with 0."""
        if not 0 <= num_tokens <= self.num_cached:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_cached} cached tokens")
        num_left = self.num_cached - num_tokens
        if num_left >= len(self._positions):
            del self._to_recompute[num_left - len(self._positions) :]
        elif self.is_stateful:
            self._restore(num_left)
        else:
            with torch.inference_mode():
                model_cache.crop(self._cache, num_left)
            del self._positions[num_left:], self._token_ids[num_left:]
        self._states.keep_latest()

    def _restore(self, num_left: int) -> None:
        """Go back to the latest state of no more than num_left tokens; the tokens between are recomputed."""
        with torch.inference_mode():
            num_slots = self._states.restore(num_left)
        if not num_slots:
            self._cache = model_cache.new_cache(self.model.config)
            self._states = States(self._cache)
        forgotten = self._token_ids[num_slots:num_left], self._positions[num_slots:num_left]
        self._to_recompute = list(zip(*forgotten, strict=True))
        del self._positions[num_slots:], self._token_ids[num_slots:]

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep only these cache slots; their positions stay as they were.

        A recurrent state cannot forget single tokens: a model that has one keeps its whole context.
        """
        if self.is_stateful or len(slots) == self.num_cached:
            return
        with torch.inference_mode():
            model_cache.keep_slots(self._cache, slots, self.model.device)
        # Where positions go back is not looked for: the largest is.
        self._restored_end = len(slots) if self._restored_end else 0
        self._positions = [self._positions[slot] for slot in slots]
        self._token_ids = [self._token_ids[slot] for slot in slots]

    def prefill_kept(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Forget everything, and hold the prompt's tokens at these increasing positions alone, through all layers.

        They count as cached at once, and the next forward prefills them.
        """
        self._cache = model_cache.new_cache(self.model.config)
        self._states = States(self._cache)
        self._token_ids, self._positions = [], []
        self._restored_end = 0
        self._to_recompute = [(prompt_ids[position], position) for position in positions]

    def capture(self) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture the queries and keys of every forward inside the block, by layer."""
        return capture_attention()
