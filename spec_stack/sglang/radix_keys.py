"""Radix keys with positions, so that equal keys mean equal KV.

The key of the token in slot j is id + (position - j) * 2**32: the plain id until something has been dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_stack.sglang.positions import PositionMap

_SHIFT = 32


class PlacedKey(str):
    """A pruned request's extra_key, which carries the position map to every place where SGLang makes a key of the
    request.

    namespace is the client's own extra_key, unchanged in the key, so tenants stay separated.
    """

    namespace: str | None
    _moved: np.ndarray[Any, np.dtype[np.int64]]
    _moved_after: int

    @classmethod
    def of(cls, positions: PositionMap, namespace: str | None) -> PlacedKey:
        key = cls("placed by spec_stack")
        key.namespace = namespace
        kept = positions.target.numpy()
        key._moved = (kept - np.arange(len(kept))) << _SHIFT
        key._moved_after = positions.num_dropped << _SHIFT
        return key

    def place(self, token_ids: Sequence[int]) -> array[int]:
        """The request's tokens from the first one on, as the key holds them."""
        ids = np.array(token_ids, dtype=np.int64)
        num_kept = min(len(ids), len(self._moved))
        ids[:num_kept] += self._moved[:num_kept]
        ids[num_kept:] += self._moved_after
        return array("q", ids.tobytes())


def place_tokens(
    init: Callable[..., None], key: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Wraps `RadixKey.__init__`, where SGLang makes all of its keys.

    Slices of a key get placed tokens and the plain namespace, so nothing is placed twice.
    """
    if isinstance(extra_key, PlacedKey):
        token_ids, extra_key = extra_key.place(token_ids), extra_key.namespace
    init(key, token_ids, extra_key, *args, **kwargs)
