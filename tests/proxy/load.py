"""Many clients at once before `spec-stack proxy` in a process of its own, for minutes: errors, and what it costs.

python -m tests.proxy.load --minutes 5 --dots

The upstream server is the recording one of the tests. Of a client's requests three in four are short, and pass
unpruned; then short chats are timed alone, with and without the proxy. With --dots another client sends long runs of
dots meanwhile, and the longest time of /health is told.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, sleep
from typing import Any

import httpx2
import psutil

from tests.cli.test_proxy import free_port
from tests.proxy.test_pruning import CHAT, CODE
from tests.support.upstream import EVENTS, FakeUpstream

SHORT = {"messages": [{"role": "user", "content": "Hello"}]}


class Client:
    """Sends one client's requests. errors: what went wrong."""

    def __init__(self, url: str, name: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {name}"}, timeout=120)
        self._name, self.errors, self.outcomes = name, list[str](), Counter[str]()
        self.short_s, self.taken_s = list[float](), list[float]()

    def run(self, end: float) -> None:
        bodies: list[dict[str, Any]] = [SHORT, {**SHORT, "stream": True}, SHORT, self._long()]
        while monotonic() < end:
            for body in bodies:
                try:
                    self._send(body)
                except Exception as error:
                    # A load test counts whatever goes wrong, and goes on.
                    self.errors.append(repr(error))

    def _send(self, body: dict[str, Any]) -> None:
        began = monotonic()
        response = self._http.post(CHAT, json=body)
        self.taken_s.append(monotonic() - began)
        if body == SHORT:
            self.short_s.append(self.taken_s[-1])
        self.outcomes[response.headers["x-spec-stack-reason"].partition(" ")[0]] += 1
        is_whole = response.content == b"".join(EVENTS) if "stream" in body else "choices" in response.json()
        if response.status_code != 200 or not is_whole:
            self.errors.append(f"{response.status_code} {response.content[:100]!r}")

    def _long(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"{CODE}\nI am {self._name}."}]}


def send_dots(url: str, end: float) -> list[float]:
    """Send runs of stops, and return the seconds that /health takes beside them."""
    taken: list[float] = []
    with httpx2.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(1) as pool:
        while monotonic() < end:
            for mark in ".!?":
                body = {"messages": [{"role": "user", "content": f"{mark * 18_000}x" * 3}]}
                sent = pool.submit(client.post, CHAT, json=body)
                while not sent.done():
                    began = monotonic()
                    httpx2.get(f"{url}/health", timeout=600)
                    taken.append(monotonic() - began)
                    sleep(0.1)
                sent.result().raise_for_status()
    return taken


def milliseconds(url: str, num_requests: int = 200) -> list[float]:
    """Times of short chats, one after the other."""
    with httpx2.Client(base_url=url) as client:
        taken = []
        for _ in range(num_requests):
            began = monotonic()
            client.post(CHAT, json=SHORT).raise_for_status()
            taken.append(1000 * (monotonic() - began))
    return taken


def both(direct: str, proxied: str) -> dict[str, float]:
    return {"direct": round(median(milliseconds(direct)), 2), "proxy": round(median(milliseconds(proxied)), 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--dots", action="store_true")
    arguments = parser.parse_args()
    upstream, port = FakeUpstream(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "spec_stack", "proxy", "--upstream", upstream.url, "--port", str(port)]
    proxy = subprocess.Popen(
        [*command, "--device", "cpu", "--min-prompt-tokens", "400"],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            try:
                httpx2.get(f"{url}/health")
                break
            except httpx2.ConnectError:
                sleep(0.2)
        before = both(upstream.url, url)
        clients = [Client(url, f"client {at}") for at in range(arguments.clients)]
        begin = monotonic()
        end = begin + 60 * arguments.minutes
        memory_mb = {}
        with ThreadPoolExecutor(arguments.clients + 1) as pool:
            health_s = pool.submit(send_dots, url, end) if arguments.dots else None
            running = [pool.submit(client.run, end) for client in clients]
            # From a tenth of the time on, when all caches have been filled once.
            for share in (0.1, 0.25, 0.5, 0.75, 1.0):
                sleep(max(0.0, begin + share * (end - begin) - monotonic()))
                memory_mb[share] = psutil.Process(proxy.pid).memory_info().rss // 1_000_000
            for each in running:
                each.result()
        afterwards = both(upstream.url, url)
        errors = [error for client in clients for error in client.errors]
        figures = {
            "outcomes": sum((client.outcomes for client in clients), Counter()),
            "longest_health_s": None if health_s is None else round(max(health_s.result()), 2),
            "num_errors": len(errors),
            "errors": errors[:5],
            "p99_s": round(quantiles([taken for client in clients for taken in client.taken_s], n=100)[98], 3),
            "short_under_load_ms": round(1000 * median(taken for client in clients for taken in client.short_s), 1),
            "short_alone_before_ms": before,
            "short_alone_afterwards_ms": afterwards,
            "memory_mb": memory_mb,
        }
        print(json.dumps(figures, indent=1))  # noqa: T201
    finally:
        proxy.kill()
        proxy.wait()
        upstream.stop()


if __name__ == "__main__":
    main()
