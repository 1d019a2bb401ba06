"""An SGLang server on loopback for as long as a `with` block runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def other_plugins() -> str:
    """SGLang's list of allowed plugins (SGLANG_PLUGINS) without ours; a name nobody has, where there is no other."""
    names = [entry.name for entry in entry_points(group="sglang.srt.plugins") if entry.name != PLUGIN]
    return ",".join(names) or "none"


class SglangServer:
    """`python -m sglang.launch_server` in a process group of its own, which is ended when the block is left.

    arguments: the launch arguments, without host and port. environment: goes over this process's own.
    Entering waits until the server is ready. Raises ValueError where the port is taken, ServerError where it dies or
    is not ready within start_limit_s.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], port: int, log: Path, start_limit_s: float
    ) -> None:
        self.port = port
        self._command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *arguments]
        self._environment = {**os.environ, **environment}
        self._log = log
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SglangServer:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.port))
            except OSError as error:
                raise ValueError(f"port {self.port} is in use; choose another with --port, or leave it out") from error
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def explain(self, what: str) -> str:
        """`what`, whether the server still runs, and its last log lines."""
        status = self._process.poll() if self._process else None
        ended = "" if status is None else f" (it has ended with status {status})"
        # SGLang names every model whose import failed, on every start.
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line[:300] for line in lines if line.strip() and "Ignore import error" not in line]
        return "\n  ".join([f"{what}{ended}. Its last log lines:", *lines[-15:]])

    def stop(self) -> None:
        """End the whole process group, whatever state it is in."""
        process = self._process
        if process is None:
            return
        try:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=10)
        finally:
            # SGLang's own processes may outlive the one that was waited for.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait_until_ready(self) -> None:
        until = monotonic() + self._start_limit_s
        while monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                raise ServerError(self.explain("the server did not start"))
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5):
                    return
            except (OSError, HTTPException):
                sleep(0.5)
        raise ServerError(self.explain(f"the server was not ready after {self._start_limit_s:.0f} s"))
