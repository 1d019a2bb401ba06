"""Index of the draft's own KV pool: a radix tree over token ids. No SGLang and no tensors.

A scoring leases a text's slots and shares its cached prefix; the least recently used suffixes are evicted. No pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class PoolFullError(RuntimeError):
    """The text does not fit into the pool, even after eviction. Its prompt is prefilled densely."""


class _Node:
    """A run of tokens after its parent's. num_pins: leases that end here or below."""

    __slots__ = ("children", "last_used", "num_pins", "parent", "slots", "token_ids")

    def __init__(self, parent: _Node | None, token_ids: Ints, slots: Ints, last_used: int) -> None:
        self.parent, self.token_ids, self.slots, self.last_used = parent, token_ids, slots, last_used
        self.children: dict[int, _Node] = {}
        self.num_pins = 0


class _FreeSlots:
    """Free slots. A text's slots are contiguous where possible, since such are read in place."""

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
            raise RuntimeError("slots of the draft pool were given back twice")
        self._is_free[slots] = True
        self.num_free += len(slots)


class Lease:
    """The slots of one text during its scoring: `slots` has one for every token from the first one on.

    num_shared: the first slots, which the pool had already; read-only. End it with `keep` or `drop`; then it is empty.
    """

    def __init__(self, pool: DraftPool, namespace: Hashable, token_ids: Ints, node: _Node, shared: Ints) -> None:
        self._pool, self._namespace, self._token_ids, self._node = pool, namespace, token_ids, node
        self.slots, self.num_shared = shared, len(shared)

    def extend(self, num_slots: int) -> None:
        """Take so many more slots. Raises PoolFullError, with nothing taken, where there is no room."""
        last = int(self.slots[-1]) if len(self.slots) else None
        self.slots = np.concatenate([self.slots, self._pool._take(num_slots, last)])

    def keep(self, num_tokens: int) -> None:
        """End, and leave the first num_tokens, which have been written, in the pool."""
        self._pool._end(self, max(num_tokens, self.num_shared))

    def drop(self) -> None:
        """End, and leave nothing new in the pool."""
        self.keep(self.num_shared)


class DraftPool:
    """The index of a pool of num_slots slots, 1 or more."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a draft pool needs 1 slot or more, got {num_slots}")
        self.num_slots = num_slots
        self._clear()

    def _clear(self) -> None:
        self._free = _FreeSlots(self.num_slots)
        self._roots: dict[Hashable, _Node] = {}
        self._clock = 0
        self._num_leases = 0

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_pinned(self) -> int:
        """Slots of the tree that leases share."""
        return sum(len(node.slots) for node in self._nodes() if node.num_pins)

    @property
    def num_held(self) -> int:
        """Slots of the tree."""
        return sum(len(node.slots) for node in self._nodes())

    def lease(self, namespace: Hashable, token_ids: Sequence[int] | Ints, num_wanted: int | None = None) -> Lease:
        """Begin to work on a text. Texts are shared inside a namespace alone; num_wanted: most slots to share, None for
        all.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        root = self._roots.setdefault(namespace, _Node(None, ids[:0], ids[:0], 0))
        node, shared = self._walk(root, ids[: len(ids) if num_wanted is None else num_wanted])
        self._pin(node, 1)
        self._num_leases += 1
        return Lease(self, namespace, ids, node, shared)

    def num_shared(self, namespace: Hashable, token_ids: Sequence[int] | Ints) -> int:
        """Length of the text's prefix in the pool. Changes nothing."""
        ids, at, node = np.asarray(token_ids, dtype=np.int64), 0, self._roots.get(namespace)
        while node is not None and at < len(ids):
            node = node.children.get(int(ids[at]))
            if node is None:
                break
            num_equal = num_common(node.token_ids, ids[at:])
            at += num_equal
            if num_equal < len(node.token_ids):
                break
        return at

    def clear(self) -> None:
        """Forget all texts. Raises RuntimeError while one is leased."""
        if self._num_leases:
            raise RuntimeError(f"the draft pool cannot be cleared while {self._num_leases} texts are worked on")
        self._clear()

    def _walk(self, node: _Node, ids: Ints) -> tuple[_Node, Ints]:
        """The node where the longest known prefix ends, and its slots. Splits a run that is known in part."""
        self._clock += 1
        found, at = [], 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                break
            num_equal = num_common(child.token_ids, ids[at:])
            node = child if num_equal == len(child.token_ids) else self._split(child, num_equal)
            node.last_used = self._clock
            found.append(node.slots)
            at += num_equal
            if node is not child:
                break
        return node, np.concatenate([np.empty(0, dtype=np.int64), *found])

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        """A new node takes the run's first tokens; `node`, which leases may refer to, keeps the rest."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root of a draft pool has no tokens to split")
        upper = _Node(parent, node.token_ids[:at], node.slots[:at], node.last_used)
        upper.num_pins = node.num_pins
        parent.children[int(upper.token_ids[0])] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[at:], node.slots[at:], upper
        upper.children[int(node.token_ids[0])] = node
        return upper

    @staticmethod
    def _pin(node: _Node, by: int) -> None:
        at: _Node | None = node
        while at is not None:
            at.num_pins += by
            at = at.parent

    def _take(self, num_slots: int, after: int | None) -> Ints:
        missing = num_slots - self._free.num_free
        if missing > 0:
            evictable = sum(len(node.slots) for node in self._nodes() if not node.num_pins)
            if missing > evictable:
                room = self._free.num_free + evictable
                raise PoolFullError(f"the draft pool has room for {room} tokens, and scoring needs {num_slots}")
            self._evict(missing)
        return self._free.take(num_slots, after)

    def _evict(self, num_slots: int) -> None:
        """Free that many slots from the ends of the least recently used texts."""
        leaves = [
            (node.last_used, at, node)
            for at, node in enumerate(self._nodes())
            if not node.children and not node.num_pins and node.parent is not None
        ]
        heapq.heapify(leaves)
        order = len(leaves)
        while num_slots > 0:
            _, _, leaf = heapq.heappop(leaves)
            num_cut = min(num_slots, len(leaf.slots))
            self._free.give_back(leaf.slots[len(leaf.slots) - num_cut :])
            num_slots -= num_cut
            if num_cut < len(leaf.slots):
                leaf.token_ids, leaf.slots = leaf.token_ids[:-num_cut], leaf.slots[:-num_cut]
                continue
            parent = leaf.parent
            if parent is None:
                raise RuntimeError("the root of a draft pool was evicted")
            del parent.children[int(leaf.token_ids[0])]
            if not parent.children and not parent.num_pins and parent.parent is not None:
                heapq.heappush(leaves, (parent.last_used, order, parent))
                order += 1
        self._roots = {name: root for name, root in self._roots.items() if root.children or root.num_pins}

    def _end(self, lease: Lease, num_kept: int) -> None:
        node, at = lease._node, lease.num_shared
        ids, slots = lease._token_ids[:num_kept], lease.slots
        self._clock += 1
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                leaf = _Node(node, ids[at:].copy(), slots[at : len(ids)].copy(), self._clock)
                node.children[int(ids[at])] = leaf
                at = len(ids)
                break
            # Another lease wrote the same text meanwhile.
            num_equal = num_common(child.token_ids, ids[at:])
            node = child if num_equal == len(child.token_ids) else self._split(child, num_equal)
            node.last_used = self._clock
            self._free.give_back(slots[at : at + num_equal])
            at += num_equal
        self._free.give_back(slots[max(at, lease.num_shared) :])
        self._pin(lease._node, -1)
        self._num_leases -= 1
        lease.slots, lease.num_shared = slots[:0], 0
        root = self._roots[lease._namespace]
        if not root.children and not root.num_pins:
            del self._roots[lease._namespace]

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def num_common(first: Ints, second: Ints) -> int:
    """Length of the longest common prefix."""
    length, at, size = min(len(first), len(second)), 0, 64
    # Most texts differ soon, and many are compared with each new one.
    while at < length:
        stop = min(at + size, length)
        differs = np.flatnonzero(first[at:stop] != second[at:stop])
        if len(differs):
            return at + int(differs[0])
        at, size = stop, 4 * size
    return length
