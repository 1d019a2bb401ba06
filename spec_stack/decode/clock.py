"""The clock of a request, shared by all of its phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Phase = Literal["scoring", "draft", "verify", "controller"]


class Clock:
    """Seconds since creation, without the pauses of a stream's caller; not thread-safe. A nested phase is charged to
    the inner phase only. now: returns the time in seconds."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._started = now()
        self._paused: float | None = None
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        # Seconds of inner phases, one entry per open phase.
        self._inner: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since creation without pauses."""
        return self._now() - self._started

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Charge the block's seconds to a phase."""
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
        """Seconds charged to a phase since the last call."""
        return self._seconds.pop(phase, 0.0)

    def pause(self) -> None:
        """Stop the clock while the caller holds the stream."""
        self._paused = self._now()

    def resume(self) -> None:
        """Continue after a pause; without one, do nothing."""
        if self._paused is not None:
            self._started += self._now() - self._paused
            self._paused = None
