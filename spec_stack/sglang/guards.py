"""Bound what a failure of this plugin costs: a dense prompt, a proposal, a number, never the server. No SGLang here."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)
# Of every failure: what comes back at each step would fill the disk. Messages that differ in numbers are one failure;
# beyond so many failures their kind of exception alone tells them apart.
_MOST_TRACEBACKS = 20
_MOST_TOLD_APART = 1000
_counted: Counter[str] = Counter()
_logged: Counter[tuple[str, str]] = Counter()


def num_failures() -> dict[str, int]:
    """The failures of this process since its start, by what failed."""
    return dict(_counted)


def note_failure(what: str, instead: str) -> None:
    """Log the exception that is being handled, with its traceback, and what is done instead."""
    _counted[what] += 1
    error = sys.exception()
    kind = what, re.sub(r"\d+", "0", repr(error))[:200]
    if kind not in _logged and len(_logged) >= _MOST_TOLD_APART:
        kind = what, type(error).__name__
    _logged[kind] += 1
    if _logged[kind] <= _MOST_TRACEBACKS:
        logger.exception("%s: %s failed; %s", NAME, what, instead)


@contextmanager
def harmless(what: str, instead: str) -> Iterator[None]:
    """Let no exception out of the block; log it instead.

    what: what the block does, in few words, which failures are counted under. instead: what comes of it.
    """
    try:
        yield
    except Exception:
        note_failure(what, instead)
