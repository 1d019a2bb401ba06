"""`spec-stack serve` or `spec-stack proxy` in a process of its own, and many clients of it for minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
import psutil

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SHUTDOWN_S, START_S = 1.0, 900.0


class ServerProcess:
    """A server over embedded models, as soon as it answers, until `stop`."""

    def __init__(self, *arguments: str, log: Path = Path(os.devnull)) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "spec_stack", *arguments, "--port", str(self.port)]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", "--shutdown-s", str(SHUTDOWN_S)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=stderr,
            )
        end = monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None
            if monotonic() > end:
                self.stop()
                raise TimeoutError(f"the server does not answer after {START_S} s")
            sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", timeout=60).status_code == 200
        except httpx2.TransportError:
            return False

    def memory_mb(self) -> list[int]:
        """Resident memory of it and of its workers, which begin anew after some hundred requests."""
        server, found = psutil.Process(self.process.pid), []
        for each in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found.append(round(each.memory_info().rss / 1e6))
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def soak(server: ServerProcess, clients: Sequence[Callable[[], None]], minutes: float) -> dict[float, Any]:
    """Call clients again and again, side by side. Returns the server's memory by the share of the time, from a tenth of
    it on, when all caches have been filled once."""
    begin = monotonic()
    end, memory_mb = begin + 60 * minutes, {}

    def keep_going(client: Callable[[], None]) -> None:
        while monotonic() < end:
            client()

    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(keep_going, client) for client in clients]
        for share in (0.1, 0.25, 0.5, 0.75, 1.0):
            sleep(max(0.0, begin + share * (end - begin) - monotonic()))
            memory_mb[share] = server.memory_mb()
        for each in running:
            each.result()
    return memory_mb
