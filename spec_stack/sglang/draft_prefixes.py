"""Which slots of the draft's pool hold which text: a map of prefixes. No SGLang import.

A scoring leases a text's slots and shares its known prefix. Texts that begin alike share slots, so the slots that one
text alone has are its last ones; eviction cuts the least recently used texts from their ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_stack.prefill.draft_kv_budget import Ints


class PoolFullError(RuntimeError):
    """The text does not fit into the pool, even after eviction. Its prompt is prefilled densely."""


@dataclass(eq=False)
class _Text:
    """token_ids[i] has its keys and values in slots[i]."""

    namespace: Hashable
    token_ids: Ints
    slots: Ints


class DraftPrefixes:
    """num_slots slots, 1 or more. num_evicted: tokens so far that made room for others."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_evicted = num_slots, 0
        self.clear()

    def clear(self) -> None:
        """Forget all texts; none may be leased."""
        # The least recently used first.
        self._texts: list[_Text] = []
        # Texts and leases that have a slot; it is free without either.
        self._num_texts = np.zeros(self.num_slots, dtype=np.int64)
        self._num_leases = np.zeros(self.num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return int(self._is_free().sum())

    @property
    def num_used(self) -> int:
        """Slots of texts."""
        return int((self._num_texts > 0).sum())

    @property
    def num_pinned(self) -> int:
        """Slots of texts that leases share."""
        return int(((self._num_texts > 0) & (self._num_leases > 0)).sum())

    @property
    def num_available(self) -> int:
        """Slots that are free or can be evicted."""
        return int((self._num_leases == 0).sum())

    def _is_free(self) -> NDArray[np.bool_]:
        is_free: NDArray[np.bool_] = (self._num_texts == 0) & (self._num_leases == 0)
        return is_free

    def state(self) -> dict[str, int]:
        slots = {"num_used": self.num_used, "num_free": self.num_free, "num_pinned": self.num_pinned}
        return {"num_tokens": self.num_slots, **slots, "num_evicted": self.num_evicted}

    def lease(self, namespace: Hashable, token_ids: Sequence[int], num_wanted: int | None = None) -> Lease:
        """Begin to work on a text. Texts are shared inside a namespace alone. num_wanted: most slots to share."""
        return Lease(self, namespace, token_ids, len(token_ids) if num_wanted is None else num_wanted)

    def num_shared(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """Length of the text's prefix in the pool."""
        return len(self._match(namespace, np.asarray(token_ids, dtype=np.int64)))

    def has_room(self, namespace: Hashable, token_ids: Sequence[int], num_wanted: int, num_more: int) -> bool:
        """Whether a lease of a text that shares num_wanted slots at most can have the rest of it and num_more slots."""
        shared = self._match(namespace, np.asarray(token_ids[:num_wanted], dtype=np.int64))
        # The lease pins what it shares.
        room = self.num_available - int((self._num_leases[shared] == 0).sum())
        return len(token_ids) - len(shared) + num_more <= room

    def _match(self, namespace: Hashable, token_ids: Ints) -> Ints:
        """The slots of a text's longest prefix, whose text is the most recently used one now."""
        lengths = [num_equal(text.token_ids, token_ids) if text.namespace == namespace else 0 for text in self._texts]
        longest = max(lengths, default=0)
        if not longest:
            return np.zeros(0, dtype=np.int64)
        found = self._texts.pop(len(lengths) - 1 - lengths[::-1].index(longest))
        self._texts.append(found)
        return found.slots[:longest]

    def take(self, num_slots: int) -> Ints:
        """Lease the first free slots; the least recently used texts make room. Raises PoolFullError, nothing taken."""
        room = self.num_available
        if num_slots > room:
            raise PoolFullError(f"the draft pool has room for {room} tokens, and scoring needs {num_slots}")
        for text in list(self._texts):
            if (missing := num_slots - self.num_free) <= 0:
                break
            self._cut(text, missing)
        taken = np.flatnonzero(self._is_free())[:num_slots]
        self.lease_slots(taken, 1)
        return taken

    def lease_slots(self, slots: Ints, by: int) -> None:
        self._num_leases[slots] += by

    def _cut(self, text: _Text, num_wanted: int) -> None:
        """Free up to num_wanted slots at a text's end, which no other text has and no lease shares."""
        is_own = (self._num_texts[text.slots] == 1) & (self._num_leases[text.slots] == 0)
        num_cut = min(num_wanted, int(is_own.sum()))
        num_left = len(text.slots) - num_cut
        self.num_evicted += num_cut
        self._num_texts[text.slots[num_left:]] -= 1
        text.token_ids, text.slots = text.token_ids[:num_left], text.slots[:num_left]
        # Nothing of its own is left, so that it knows no more than others do.
        if (self._num_texts[text.slots] > 1).all():
            self._remove(text)

    def _remove(self, text: _Text) -> None:
        self._texts.remove(text)
        self._num_texts[text.slots] -= 1

    def insert(self, namespace: Hashable, token_ids: Ints, slots: Ints) -> None:
        """Add a text by its slots; those of a prefix that is known already are not used."""
        known = self._match(namespace, token_ids)
        if len(known) == len(token_ids):
            return
        text = _Text(namespace, token_ids, np.concatenate([known, slots[len(known) :]]))
        self._num_texts[text.slots] += 1
        for shorter in [it for it in self._texts if it.namespace == namespace and len(it.slots) <= len(known)]:
            if np.array_equal(shorter.slots, text.slots[: len(shorter.slots)]):
                self._remove(shorter)
        self._texts.append(text)


class Lease:
    """The slots of one text during its scoring, the first num_shared of them read-only. End it with `insert`.

    num_agreed: tokens that all ranks have, for the scorer.
    """

    def __init__(self, pool: DraftPrefixes, namespace: Hashable, token_ids: Sequence[int], num_wanted: int) -> None:
        self._pool, self._namespace = pool, namespace
        self._token_ids: Ints = np.asarray(token_ids, dtype=np.int64)
        self.slots = pool._match(namespace, self._token_ids[:num_wanted])
        self.num_shared = self.num_agreed = len(self.slots)
        pool.lease_slots(self.slots, 1)

    def extend(self, num_slots: int) -> None:
        """Take so many more slots. Raises PoolFullError, with nothing taken, where there is no room."""
        self.slots = np.concatenate([self.slots, self._pool.take(num_slots)])

    def insert(self, num_tokens: int) -> None:
        """End, and leave the first num_tokens, which have been written, in the pool; at least what was shared."""
        num_kept = max(num_tokens, self.num_shared)
        self._pool.insert(self._namespace, self._token_ids[:num_kept], self.slots[:num_kept])
        self._pool.lease_slots(self.slots, -1)
        self.slots, self.num_shared = self.slots[:0], 0


def num_equal(first: Ints, second: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
