"""Many clients at once before `spec-stack proxy` in a process of its own, for minutes: errors, and memory over time.

python -m tests.proxy.load --minutes 5

The upstream server is the recording one of the tests. Of a client's requests three in four are short, and pass
unpruned.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import httpx2

from tests.proxy.test_pruning import CHAT, CODE
from tests.support.server_process import ServerProcess, soak
from tests.support.upstream import EVENTS, FakeUpstream

SHORT = {"messages": [{"role": "user", "content": "Hello"}]}


class Client:
    """Sends one client's requests. errors: what went wrong."""

    def __init__(self, url: str, name: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {name}"}, timeout=120)
        self._long = {"messages": [{"role": "user", "content": f"{CODE}\nI am {name}."}]}
        self.errors, self.outcomes = list[str](), Counter[str]()

    def run(self) -> None:
        for body in (SHORT, {**SHORT, "stream": True}, SHORT, self._long):
            try:
                self._send(body)
            except Exception as error:
                # A load test counts whatever goes wrong, and goes on.
                self.errors.append(repr(error))

    def _send(self, body: dict[str, Any]) -> None:
        response = self._http.post(CHAT, json=body)
        self.outcomes[response.headers["x-spec-stack-reason"].partition(" ")[0]] += 1
        is_whole = response.content == b"".join(EVENTS) if "stream" in body else "choices" in response.json()
        if response.status_code != 200 or not is_whole:
            self.errors.append(f"{response.status_code} {response.content[:100]!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=20)
    arguments = parser.parse_args()
    upstream = FakeUpstream()
    proxy = ServerProcess("proxy", "--upstream", upstream.url, "--min-prompt-tokens", "400")
    try:
        clients = [Client(proxy.url, f"client {at}") for at in range(arguments.clients)]
        memory_mb = soak(proxy, [client.run for client in clients], arguments.minutes)
        errors = [error for client in clients for error in client.errors]
        figures = {
            "outcomes": sum((client.outcomes for client in clients), Counter()),
            "num_errors": len(errors),
            "errors": errors[:5],
            "memory_mb": memory_mb,
        }
        print(json.dumps(figures, indent=1))  # noqa: T201
    finally:
        proxy.stop()
        upstream.stop()


if __name__ == "__main__":
    main()
