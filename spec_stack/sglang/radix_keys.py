"""Radix keys that know where each token stands, so that equal keys are equal KV.

The KV at a cache slot is a function of the tokens and of their positions, up to that slot. SGLang's radix cache knows a
token by its id alone, which is enough while slot j stands at position j. A pruned prompt's tokens do not: there the key
of the token in slot j is id + (position - j) * 2**32. Where nothing has been dropped yet that is the id itself, so
dense and pruned prompts share what they truly share, and nothing else. What a request is yet to generate has its
positions already (`PositionMap`), so the same key serves a prompt with its reply, and one that was retracted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_stack.sglang.guards import note_failure
from spec_stack.sglang.positions import PositionMap

_SHIFT = 32


class PlacedKey(str):
    """Stands in a pruned request's extra_key: carries the map to every place where SGLang makes a key of the request.

    namespace is the client's own extra_key. It goes into the key as it is, so the wall between tenants stands.
    """

    namespace: str | None
    _positions: PositionMap
    _moved: np.ndarray[Any, np.dtype[np.int64]]
    _moved_after: int

    @classmethod
    def of(cls, positions: PositionMap, namespace: str | None) -> PlacedKey:
        key = cls("placed by spec_stack")
        key.namespace = namespace
        key._positions = positions
        kept = positions.target.numpy()
        key._moved = (kept - np.arange(len(kept))) << _SHIFT
        key._moved_after = positions.num_dropped << _SHIFT
        return key

    def place(self, token_ids: Sequence[int]) -> array[int]:
        """The tokens of the request from its first one on, as the key holds them."""
        ids = np.array(token_ids, dtype=np.int64)
        num_kept = min(len(ids), len(self._moved))
        ids[:num_kept] += self._moved[:num_kept]
        ids[num_kept:] += self._moved_after
        return array("q", ids.tobytes())

    def place_one_by_one(self, token_ids: Sequence[int]) -> array[int]:
        """The same as `place`, token by token: for when that failed, since any other key would be another KV's."""
        kept, num_dropped = self._positions.target.tolist(), self._positions.num_dropped
        moved = (kept[at] - at if at < len(kept) else num_dropped for at in range(len(token_ids)))
        return array("q", [int(token) + (by << _SHIFT) for token, by in zip(token_ids, moved, strict=True)])


def place_tokens(
    init: Callable[..., None], key: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Around `RadixKey.__init__`, the one place where SGLang's caches and queues make their keys.

    Slices of a key are made of placed tokens and of the plain namespace, so nothing is placed twice.
    """
    if isinstance(extra_key, PlacedKey):
        try:
            placed = extra_key.place(token_ids)
        except Exception:
            note_failure("making a radix key", "it is made token by token")
            placed = extra_key.place_one_by_one(token_ids)
        token_ids, extra_key = placed, extra_key.namespace
    init(key, token_ids, extra_key, *args, **kwargs)
