"""A progress bar for prefills on a terminal."""

from __future__ import annotations

from typing import Any, TextIO

from tqdm import tqdm


class ProgressLine:
    """Shows each phase of a prefill on one line of a terminal after `wait_s` seconds, and erases it afterwards. out:
    standard error by default."""

    def __init__(self, out: TextIO | None = None, wait_s: float = 1.0) -> None:
        self._out, self._wait_s = out, wait_s
        self._phase = ""
        self._bar: Any = None

    def __call__(self, num_done: int, num_total: int, phase: str) -> None:
        if self._bar is None or phase != self._phase:
            self.clear()
            self._phase = phase
            # disable=None shows nothing where `out` is no terminal.
            self._bar = tqdm(total=num_total, desc=phase, file=self._out, delay=self._wait_s, leave=False, disable=None)
        self._bar.update(num_done - self._bar.n)
        if num_done >= num_total:
            self.clear()

    def clear(self) -> None:
        """Erase the line."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
