"""Policies by name for a generator: what one request taught is there for the next, and none is shared by two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from spec_stack.controller.base import GammaPolicy
from spec_stack.controller.registry import make_policy


class PolicyPool:
    """Lends policies, one to a request at a time; safe to use from several threads."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[Any, ...], list[GammaPolicy]] = defaultdict(list)
        self._lock = Lock()

    @contextmanager
    def lend(self, name: str, **options: Any) -> Iterator[GammaPolicy]:
        """An idle policy of that name and options for as long as the block lasts, or a new one where all are lent.

        Raises ValueError as `make_policy` does.
        """
        with self._lock:
            idle = self._idle[(name, *sorted(options.items()))]
            policy = idle.pop() if idle else make_policy(name, **options)
        try:
            yield policy
        finally:
            with self._lock:
                idle.append(policy)
