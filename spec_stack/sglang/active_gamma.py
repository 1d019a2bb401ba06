"""SGLang's record of the gamma that holds now, which it keeps with every change of it, for ever."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context

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
