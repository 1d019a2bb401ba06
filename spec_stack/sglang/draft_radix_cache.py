"""Which slots of the draft's own KV pool hold which text: SGLang's radix tree over a pool without pages.

A scoring leases a text's slots and shares its cached prefix; the least recently used texts are evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

Ints = npt.NDArray[np.int64]


class PoolFullError(RuntimeError):
    """The text does not fit into the pool, even after eviction. Its prompt is prefilled densely."""


class _FreeSlots:
    """Free slots, as the tree's allocator. A text's slots are contiguous where possible: such are read in place."""

    device = "cpu"

    def __init__(self, num_slots: int) -> None:
        self._is_free = np.ones(num_slots, dtype=bool)
        self.num_free = num_slots

    def take(self, num_slots: int, after: int | None) -> Ints:
        """Take free slots, those behind the slot `after` if they are free. The caller ensures that there are enough."""
        chosen = self._choose(num_slots, after)
        self._is_free[chosen] = False
        self.num_free -= num_slots
        return chosen

    def _choose(self, num_slots: int, after: int | None) -> Ints:
        if after is not None and self._is_free[after + 1 : after + 1 + num_slots].sum() == num_slots:
            return np.arange(after + 1, after + 1 + num_slots)
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        largest = int(lengths.argmax())
        spare = int(lengths[largest]) - num_slots
        if spare < 0:
            return np.flatnonzero(self._is_free)[:num_slots]
        # In the middle of the room there is, so that this text and the one before it can both grow in place. The very
        # first slot has nothing before it.
        start = int(starts[largest]) + (spare // 2 if starts[largest] else 0)
        return np.arange(start, start + num_slots)

    def give_back(self, slots: Ints) -> None:
        if self._is_free[slots].any():
            raise RuntimeError("slots of the draft's pool were given back twice")
        self._is_free[slots] = True
        self.num_free += len(slots)

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        """Called by SGLang's tree with evicted slots."""
        self.give_back(slots.numpy())


class Lease:
    """The slots of one text during its scoring, the first num_shared of them read-only. End it with `insert`.

    num_agreed: tokens that all ranks have, for the scorer.
    """

    def __init__(self, cache: DraftRadixCache, namespace: Hashable, token_ids: Sequence[int], num_wanted: int) -> None:
        self._cache, self._namespace, self._token_ids = cache, namespace, token_ids
        self._node, self.slots = cache.match(namespace, token_ids[:num_wanted])
        self.num_shared = self.num_agreed = len(self.slots)
        cache.tree.inc_lock_ref(self._node)
        cache.num_leases += 1

    def extend(self, num_slots: int) -> None:
        """Take so many more slots. Raises PoolFullError, with nothing taken, where there is no room."""
        last = int(self.slots[-1]) if len(self.slots) else None
        self._cache.make_room(num_slots)
        self.slots = np.concatenate([self.slots, self._cache.free.take(num_slots, last)])

    def insert(self, num_tokens: int) -> None:
        """End, and leave the first num_tokens, which have been written, in the pool; at least what was shared."""
        cache, num_kept = self._cache, max(num_tokens, self.num_shared)
        # Another lease may have written the same text meanwhile.
        num_known = 0
        if num_kept:
            key, value = _key(self._namespace, self._token_ids[:num_kept]), torch.from_numpy(self.slots[:num_kept])
            num_known = cache.tree.insert(InsertParams(key=key, value=value)).prefix_len
        cache.free.give_back(self.slots[self.num_shared : max(num_known, self.num_shared)])
        cache.free.give_back(self.slots[num_kept:])
        cache.tree.dec_lock_ref(self._node)
        cache.num_leases -= 1
        self.slots, self.num_shared = self.slots[:0], 0


class DraftRadixCache:
    """The tree of a pool of num_slots slots, 1 or more."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a draft pool needs 1 slot or more, got {num_slots}")
        self.num_slots, self.num_leases = num_slots, 0
        self.clear()

    def clear(self) -> None:
        """Forget all texts. Raises RuntimeError while one is leased."""
        if self.num_leases:
            raise RuntimeError(f"the draft pool cannot be cleared while {self.num_leases} texts are worked on")
        self.free = _FreeSlots(self.num_slots)
        self.tree = RadixCache.create_simulated(mock_allocator=self.free)

    @property
    def num_free(self) -> int:
        return self.free.num_free

    @property
    def num_pinned(self) -> int:
        """Slots of the tree that leases share."""
        return int(self.tree.protected_size())

    @property
    def num_held(self) -> int:
        return int(self.tree.evictable_size()) + self.num_pinned

    @property
    def num_available(self) -> int:
        """Slots that are free or can be evicted."""
        return self.num_free + int(self.tree.evictable_size())

    def state(self) -> dict[str, int]:
        held = {"num_held": self.num_held, "num_free": self.num_free, "num_pinned": self.num_pinned}
        return {"num_tokens": self.num_slots, **held}

    def lease(self, namespace: Hashable, token_ids: Sequence[int], num_wanted: int | None = None) -> Lease:
        """Begin to work on a text. Texts are shared inside a namespace alone. num_wanted: most slots to share."""
        return Lease(self, namespace, token_ids, len(token_ids) if num_wanted is None else num_wanted)

    def num_shared(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """Length of the text's prefix in the pool."""
        return len(self.match(namespace, token_ids)[1])

    def match(self, namespace: Hashable, token_ids: Sequence[int]) -> tuple[Any, Ints]:
        """The tree's node of a text's longest prefix, and its slots."""
        found = self.tree.match_prefix(MatchPrefixParams(key=_key(namespace, token_ids)))
        node = found.last_device_node
        # SGLang 0.5.22 leaves the slots with the nodes.
        slots = found.device_indices if hasattr(found, "device_indices") else self.tree.path_device_indices(node)
        return node, slots.numpy()

    def make_room(self, num_slots: int) -> None:
        """Evict the least recently used texts where fewer slots are free."""
        room = self.num_available
        if num_slots > room:
            raise PoolFullError(f"the draft pool has room for {room} tokens, and scoring needs {num_slots}")
        if num_slots > self.num_free:
            self.tree.evict(EvictParams(num_tokens=num_slots - self.num_free))


def _key(namespace: Hashable, token_ids: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", token_ids), namespace)
