"""Many clients at once before `spec-stack serve` in a process of its own, for minutes: failures, and memory over time.

python -m tests.serve.soak --minutes 20

The requests of `tests.serve.test_load` and the hostile bodies.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from spec_stack import SpecStackGenerator
from tests.serve.hostile import FORMATS, hostile
from tests.serve.test_load import Client, Expected, is_idle
from tests.support.running_app import until
from tests.support.server_process import ServerProcess, soak


class SoakClient(Client):
    kinds = (*Client.kinds, "hostile")

    def _hostile(self) -> bool:
        path, body = self._rng.choice(hostile())
        status = self._status(path, body)
        return status in (400, 413) or (status == 200 and (path, body) in FORMATS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    server, expected = ServerProcess("serve"), Expected(SpecStackGenerator.from_pretrained(device="cpu"))
    try:
        clients = [SoakClient(server.url, f"client {at}", expected) for at in range(arguments.clients)]
        memory_mb = soak(server, [client.run for client in clients], arguments.minutes)
        until(lambda: is_idle(server.url), 30)
        faults = [fault for client in clients for fault in client.faults]
        figures = {
            "counts": sum((client.counts for client in clients), Counter()),
            "num_faults": len(faults),
            "faults": faults[:5],
            "memory_mb": memory_mb,
            "idle_mb": server.memory_mb(),
        }
        print(json.dumps(figures, indent=1))  # noqa: T201
    finally:
        server.stop()


if __name__ == "__main__":
    main()
