"""SGLang's record of the gamma that holds now, which it keeps with every change of it, for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_context, get_spec

_SOURCE = "adaptive_spec.restore"


def forget_earlier_gammas(log: list[tuple[str, Any]]) -> None:
    """Keep the newest of SGLang's entries about gamma, all that it reads back. Mutates the log.

    SGLang expects a change now and then and appends one entry for each; here gamma may change at every step.
    """
    ours = [at for at, (source, _) in enumerate(log) if source == _SOURCE]
    for at in reversed(ours[:-1]):
        del log[at]


def forget_earlier_gammas_of_this_process() -> None:
    forget_earlier_gammas(get_context()._overrides_log)


def num_overrides_kept() -> int:
    """Entries in this process's log, which must not grow with the steps taken."""
    return len(get_context()._overrides_log)


@contextmanager
def a_gamma_over_zero() -> Iterator[int]:
    """The gamma that SGLang divides by, which is made 1 for the block where it is 0 now."""
    width = get_spec().speculative_num_draft_tokens
    if width > 1:
        yield width - 1
        return
    context = get_context()
    num_entries = len(context._overrides_log)
    context.override(_SOURCE, speculative_num_draft_tokens=2)
    try:
        yield 1
    finally:
        context.override(_SOURCE, speculative_num_draft_tokens=width)
        del context._overrides_log[num_entries:]
