"""Contains failures of this plugin: a dense prompt, a proposal, a number, never the server. No SGLang import."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from spec_stack.sglang.server_args import NAME

logger = logging.getLogger(__name__)
# Logged occurrences of one exception type in one place: one at each step would fill the disk.
_MOST_TRACEBACKS = 20
_counted: Counter[str] = Counter()
_logged: Counter[tuple[str, str]] = Counter()


def num_failures() -> dict[str, int]:
    """The failures of this process since its start, by name."""
    return dict(_counted)


def log_failure(what: str, instead: str) -> None:
    """Log the current exception with its traceback, and the fallback."""
    _counted[what] += 1
    kind = what, type(sys.exception()).__name__
    _logged[kind] += 1
    if _logged[kind] <= _MOST_TRACEBACKS:
        logger.exception("%s: %s failed; %s", NAME, what, instead)


@contextmanager
def log_and_continue(what: str, instead: str, *raised: type[Exception]) -> Iterator[None]:
    """Log exceptions of the block, but those to be raised. what: the work, for the counts; instead: the fallback."""
    try:
        yield
    except raised:
        raise
    except Exception:
        log_failure(what, instead)
