"""A server in a process that begins as a copy of one that has imported SGLang, which takes seven seconds.

Python's fork server imports this module once for all servers of a test process.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler  # noqa: F401


def serve(log: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """As `python -m sglang.launch_server` in a session of its own."""
    os.setsid()
    os.environ.update(environment)
    # Away from the repository: a folder named like a package would shadow it.
    os.chdir(log.parent)
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
