"""SGLang's log of gamma overrides, which grows without bound."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context

_SOURCE = "adaptive_spec.restore"


def forget_earlier_gammas(log: list[tuple[str, Any]]) -> None:
    """Keep the newest gamma entry of SGLang's log, the only one that it reads. Mutates the log.

    SGLang appends one entry per change, and here gamma may change at every step.
    """
    ours = [at for at, (source, _) in enumerate(log) if source == _SOURCE]
    for at in reversed(ours[:-1]):
        del log[at]


def forget_earlier_gammas_of_this_process() -> None:
    forget_earlier_gammas(get_context()._overrides_log)


def num_overrides_kept() -> int:
    """Entries in this process's log; must not grow with the steps."""
    return len(get_context()._overrides_log)
