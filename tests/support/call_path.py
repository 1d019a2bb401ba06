"""Counts the package's files, functions and calls that run between a call and its first token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import spec_stack

_PACKAGE = str(Path(spec_stack.__file__).parent)


@dataclass
class CallPath:
    """Frames of the package that were entered: their files, their code objects, and how often."""

    files: set[str] = field(default_factory=set)
    functions: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            self.files.add(str(Path(code.co_filename).relative_to(_PACKAGE)))
            self.functions[code.co_filename, code.co_firstlineno, code.co_qualname] += 1

    def count(self, name: str) -> int:
        """How often functions of this name were called."""
        return sum(num for (_, _, own), num in self.functions.items() if own == name)


def call_path(work: Callable[[], object]) -> CallPath:
    """Return what ran of the package, in this thread, while the work was done."""
    path = CallPath()
    sys.setprofile(path._enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return path
