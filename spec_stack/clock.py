"""Where a request's seconds go: one clock, carried through all of its phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Phase = Literal["scoring", "draft", "verify", "controller"]


class Clock:
    """Counts from its creation, without the time that the caller of a stream lets pass between steps.

    A phase inside another one is charged to the inner phase alone: the controller's seconds while the draft proposes
    are no seconds of the draft. Not thread-safe; every request has its own. now: gives the time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._started = now()
        self._paused: float | None = None
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        # Seconds of inner phases, one entry per open phase.
        self._inner: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request was made, less the pauses."""
        return self._now() - self._started

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Charge the seconds of the block to a phase."""
        started = self._now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._now() - started
            self._seconds[phase] += elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed

    def take(self, phase: Phase) -> float:
        """Seconds charged to a phase since they were last taken."""
        return self._seconds.pop(phase, 0.0)

    def pause(self) -> None:
        """Stand still: what follows is the caller's time."""
        self._paused = self._now()

    def resume(self) -> None:
        """Go on after a pause; nothing where there was none."""
        if self._paused is not None:
            self._started += self._now() - self._paused
            self._paused = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still for the length of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()
