"""An SGLang server on loopback for as long as a `with` block runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic, sleep

HOST = "127.0.0.1"
PLUGIN = "spec_stack"
# SGLang on a CPU: its CPU engine, one thread in each of its processes (more fight over few cores), nothing compiled.
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
CPU_ARGUMENTS = (
    *("--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "40000"),
)


class ServerError(OSError):
    """The server did not start, died, or does not answer; the message ends with its last log lines."""


def other_plugins() -> str:
    """SGLang's list of allowed plugins (SGLANG_PLUGINS) without ours; a name nobody has, where there is no other."""
    names = [entry.name for entry in entry_points(group="sglang.srt.plugins") if entry.name != PLUGIN]
    return ",".join(names) or "none"


@contextmanager
def sglang_server(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, start_limit_s: float
) -> Iterator[int]:
    """The port of a `python -m sglang.launch_server` in a process group of its own, once it is ready.

    arguments: the launch arguments, without host and port. environment: goes over this process's own. Raises
    ServerError where the server dies or is not ready within start_limit_s.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, log, start_limit_s)
        yield port
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, limit_s: float) -> None:
    until = monotonic() + limit_s
    while monotonic() < until:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}:\n{_last_lines(log)}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return
        except (OSError, HTTPException):
            sleep(0.5)
    raise ServerError(f"the server was not ready after {limit_s:.0f} s:\n{_last_lines(log)}")


def _last_lines(log: Path) -> str:
    # SGLang names every model whose import failed, on every start.
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line[:300] for line in lines if line.strip() and "Ignore import error" not in line][-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group: SGLang's own processes may outlive the one that was launched."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
