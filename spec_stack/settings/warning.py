"""Warnings attributed to the user's calling line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

# Python's frozen modules count as internal: iterators are called through `collections.abc`.
_NOT_THE_CALLER = (str(Path(__file__).resolve().parent.parent), "<frozen ")


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside the package, so that filters by module or line match the caller."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class OnceEach:
    """Warns once per topic."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def warn(self, topic: str, message: str) -> None:
        """Warn the caller, once per topic."""
        if topic not in self._topics:
            self._topics.add(topic)
            warn_caller(f"{message} (this is said once)")
