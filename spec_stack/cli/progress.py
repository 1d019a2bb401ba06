"""A progress line for prefills on a terminal."""

from __future__ import annotations

import sys
import threading
from time import perf_counter
from typing import TextIO


def progress_line() -> ProgressLine | None:
    """A progress line, only on a terminal."""
    return ProgressLine(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


class ProgressLine:
    """Shows a prefill's progress on one line of `out` after `wait_s` seconds, and erases it afterwards."""

    def __init__(self, out: TextIO, wait_s: float = 1.0) -> None:
        self._out, self._wait_s = out, wait_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._began = 0.0
        self._text = ""
        self._is_shown = False

    def __call__(self, num_done: int, num_total: int, phase: str) -> None:
        share = num_done / max(1, num_total)
        with self._lock:
            self._text = f"\r{phase:8} [{'#' * round(20 * share):20}] {num_done}/{num_total}"
            if self._timer is None:
                self._began = perf_counter()
                # A prefill of one chunk reports nothing between its start and end.
                self._timer = threading.Timer(self._wait_s, self._break_silence)
                self._timer.daemon = True
                self._timer.start()
            if perf_counter() - self._began >= self._wait_s:
                self._show()
        if phase == "prefill" and num_done >= num_total:
            self.clear()

    def clear(self) -> None:
        """Erase the line."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_shown:
                self._write(f"\r{'':50}\r")
            self._timer, self._is_shown = None, False

    def _break_silence(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():
                self._show()

    def _show(self) -> None:
        self._is_shown = True
        self._write(self._text)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
