"""Counts the package's files, functions and calls that run between a call and its first token."""

from __future__ import annotations

import sys
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
    functions: set[tuple[str, int, str]] = field(default_factory=set)
    num_calls: int = 0

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            self.files.add(str(Path(code.co_filename).relative_to(_PACKAGE)))
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))
            self.num_calls += 1


def call_path(work: Callable[[], object]) -> CallPath:
    """Return what ran of the package, in this thread, while the work was done."""
    path = CallPath()
    sys.setprofile(path._enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return path
