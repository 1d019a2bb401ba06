"""A model, its KV cache and its position counter, for one request: counts in, logits out, positions explicit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from spec_stack.backends.attention import LayerCapture, capture_attention
from spec_stack.backends.roomy_cache import give_room


class CachedModel:
    """One request's view of a model.

    num_cached: slots in the cache. next_position: the position after the last cached token, which is larger
    than num_cached after a sparse prefill. forward_s: seconds spent inside the model so far (on CUDA: until the
    launch returned). num_ids: width of the logits handed out, for a draft whose own are wider (the rest is cut off) or
    narrower (the rest is -inf) than the target's; None leaves them. An id it has no row for is read as its last row.
    """

    def __init__(self, model: PreTrainedModel, prefill_chunk: int, num_ids: int | None = None) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.forward_s = 0.0
        self._num_rows = model.config.vocab_size
        self._num_ids = num_ids or self._num_rows
        self._cache = give_room(DynamicCache(config=model.config))
        self._positions: list[int] = []

    @property
    def num_cached(self) -> int:
        return len(self._positions)

    @property
    def next_position(self) -> int:
        return self._positions[-1] + 1 if self._positions else 0

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
        device = self.model.device
        if self._num_ids > self._num_rows:
            token_ids = [min(token_id, self._num_rows - 1) for token_id in token_ids]
        with torch.inference_mode():
            start, total = 0, len(token_ids)
            while True:
                left = total - start
                last = left <= max(self.prefill_chunk, num_logits)
                stop = total if last else min(start + self.prefill_chunk, total - num_logits)
                logits = self.model(
                    input_ids=torch.tensor([token_ids[start:stop]], device=device),
                    position_ids=torch.tensor([positions[start:stop]], device=device),
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=num_logits if last else 1,
                ).logits
                self._positions.extend(positions[start:stop])
                start = stop
                if last:
                    break
        self.forward_s += perf_counter() - started
        if self._num_ids != self._num_rows:
            # A negative pad cuts off.
            return F.pad(logits[0], (0, self._num_ids - self._num_rows), value=-torch.inf)
        return logits[0]  # type: ignore[no-any-return]

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens cached tokens. Called after every step, also with 0."""
        if not 0 <= num_tokens <= self.num_cached:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_cached} cached tokens")
        if num_tokens:
            # Not with 0: transformers before 5.20 takes that for "crop to nothing".
            self._cache.crop(-num_tokens)
            del self._positions[-num_tokens:]

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep only these cache slots, given in increasing order; their positions stay as they were."""
        if len(slots) == self.num_cached:
            return
        index = torch.tensor(slots, device=self.model.device)
        with torch.inference_mode():
            for layer in self._cache.layers:
                layer.keys = layer.keys.index_select(2, index)
                layer.values = layer.values.index_select(2, index)
        self._positions = [self._positions[slot] for slot in slots]

    def capture(self) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture the queries and keys of every forward inside the block, by layer."""
        return capture_attention()
