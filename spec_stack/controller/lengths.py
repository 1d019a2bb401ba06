"""Keep what was measured apart by the lengths of the contexts that a step attends to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from spec_stack.controller.base import StepContext, StepRecord

# Under this a context's length hardly shows in a step's seconds.
_SHORT = 512
_Key = tuple[str, int, int]
Known = TypeVar("Known")


class ByLength(Generic[Known]):
    """What is known at each precision and length, of the target's context and of the draft's, in powers of two.

    At a length twice or half a known one, what is known there is a start: it is off by no more than steps' noise. Where
    nothing so near is known, a start is made anew, so that steps many times as long are not taken for stalls.

    Parameters
    ----------
    make : callable
        Makes what is known where nothing is.
    copy : callable
        Makes a start of what is known at a neighbouring length.
    renew : callable, optional
        Makes one of what is known at the nearest length, which is far. `make` without it.
    """

    def __init__(
        self,
        make: Callable[[], Known],
        copy: Callable[[Known], Known],
        renew: Callable[[Known], Known] | None = None,
    ) -> None:
        self._make, self._copy = make, copy
        self._renew = renew or (lambda known: make())
        self._known: dict[_Key, Known] = {}

    def at(self, step: StepContext | StepRecord) -> Known:
        """Return what is known of such a step, to be read or changed."""
        key = (step.precision, _scale(step.num_target_slots), _scale(step.num_draft_slots))
        if key not in self._known:
            self._known[key] = self._start(key)
        return self._known[key]

    def _start(self, key: _Key) -> Known:
        near = [(max(abs(each[1] - key[1]), abs(each[2] - key[2])), each) for each in self._known if each[0] == key[0]]
        if not near:
            return self._make()
        distance, nearest = min(near)
        return (self._copy if distance <= 1 else self._renew)(self._known[nearest])

    def values(self) -> list[Known]:
        """Return all that is known."""
        return list(self._known.values())


def _scale(num_slots: int) -> int:
    return round(math.log2(max(num_slots, _SHORT)))
