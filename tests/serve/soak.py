"""Many clients at once before `spec-stack serve` in a process of its own, for minutes: failures, and memory over time.

python -m tests.serve.soak --minutes 20

The requests of `tests.serve.load`, chats with tools, and the hostile bodies.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

from spec_stack import SpecStackGenerator
from tests.serve.hostile import FORMATS, hostile
from tests.serve.load import QUESTIONS, Client, Expected, Load, Outcome, becomes_idle
from tests.serve.test_hostile import Process
from tests.support.tools import TOOLS


class SoakClient(Client):
    kinds = (*Client.kinds, "tools", "hostile")

    def _tools(self) -> bool:
        messages: list[Any] = [{"role": "user", "content": self._rng.choice(QUESTIONS)}]
        options: dict[str, Any] = {"max_tokens": self._load.max_tokens, "temperature": 0}
        answer = self._openai.chat.completions.create(model="spec-stack", messages=messages, tools=TOOLS, **options)
        return answer.choices[0].message.content == self._expected.chat(messages, tools=TOOLS)

    def _hostile(self) -> bool:
        path, body = self._rng.choice(hostile())
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._openai.api_key}"}
        try:
            urlopen(Request(self._url + path, body, headers), timeout=300).close()
        except HTTPError as error:
            return error.code in (400, 413)
        return (path, body) in FORMATS


def processes_mb(pid: int) -> list[int]:
    """Resident memory of the server and of its workers, which begin anew after some hundred requests."""
    server = psutil.Process(pid)
    return [round(each.memory_info().rss / 1e6) for each in (server, *server.children(recursive=True))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    load, outcome, server = Load(arguments.clients), Outcome(), Process("--device", "cpu")
    try:
        url = f"http://127.0.0.1:{server.port}"
        generator = SpecStackGenerator.from_pretrained(device="cpu")
        clients = [
            SoakClient(url, f"client {at}", Expected(generator, load.max_tokens), load, outcome)
            for at in range(load.num_clients)
        ]
        begin = monotonic()
        end = begin + 60 * arguments.minutes

        def keep_going(client: Client) -> None:
            while monotonic() < end:
                client.run(len(client.kinds))

        memory_mb = {}
        with ThreadPoolExecutor(load.num_clients) as pool:
            running = [pool.submit(keep_going, client) for client in clients]
            # From a tenth of the time on, when all caches have been filled once.
            for share in (0.1, 0.25, 0.5, 0.75, 1.0):
                sleep(max(0.0, begin + share * (end - begin) - monotonic()))
                memory_mb[share] = processes_mb(server.process.pid)
            for each in running:
                each.result()
        figures = {
            "counts": dict(outcome.counts),
            "num_wrong": outcome.num_wrong,
            "unexpected": outcome.num_unexpected[:5],
            "num_unexpected": len(outcome.num_unexpected),
            "memory_mb": memory_mb,
            "median_s": round(median(outcome.latencies_s), 3),
            "p99_s": round(quantiles(outcome.latencies_s, n=100)[98], 3),
            "is_idle": becomes_idle(url),
            "idle_mb": processes_mb(server.process.pid),
        }
        with urlopen(f"{url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        figures["outcomes"] = [line for line in lines if line.startswith("spec_stack_requests_total")]
        print(json.dumps(figures, indent=1))  # noqa: T201
    finally:
        server.process.kill()
        server.process.wait()


if __name__ == "__main__":
    main()
