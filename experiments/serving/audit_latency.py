"""Latency of live requests through the proxy, with and without audits: 20 clients with pauses, in turns of ten seconds.

Two proxies (embedded draft), each before an upstream server of its own that works on one request at a time: a live one
takes `--service` seconds, and what a client has left ends at its next step of 10 ms. Every pruned request is audited.
Ends in one JSON line.

    python -m experiments.serving.audit_latency --minutes 10
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from experiments.common import script
from spec_stack import PrefillConfig, Pruner
from spec_stack.proxy.app import build_app
from spec_stack.proxy.config import ProxyConfig

ARMS: dict[str, dict[str, Any]] = {"without audits": {}, "with audits": {"audit_rate": 1.0}}
CLIENTS, STEP_S = 20, 0.01


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application on a loopback port, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def upstream(service_s: float) -> Starlette:
    """A server that works on one request at a time."""
    one = asyncio.Semaphore(1)

    async def answer(request: Request) -> Response:
        await request.json()
        async with one:
            end = time.monotonic() + service_s
            while time.monotonic() < end and not await request.is_disconnected():
                await asyncio.sleep(STEP_S)
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "It is 42."}}]})

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


def prompt(number: int) -> list[dict[str, str]]:
    lines = [f"The code of room {at} is {at * 7 + number}." for at in range(70)]
    return [{"role": "user", "content": "\n".join([*lines, f"What is the code of room {number % 70}?"])}]


def counted(url: str, outcome: str) -> int:
    lines = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith("spec_stack_audits_total") and f'"{outcome}"' in line]
    return sum(round(float(line.rpartition(" ")[2])) for line in found)


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all (%(default)g)")
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of an arm at a time (%(default)g)")
    parser.add_argument("--service", type=float, default=0.2, help="seconds of a request upstream (%(default)g)")
    parser.add_argument("--pause", type=float, default=20.0, help="mean seconds between a client's (%(default)g)")
    arguments = parser.parse_args()
    config = PrefillConfig(keep_rate=0.2, min_prompt_tokens=400)
    taken: dict[str, list[float]] = {name: [] for name in ARMS}
    with ExitStack() as stack:
        urls = {}
        for name, options in ARMS.items():
            pruner = Pruner.from_pretrained(device="cpu", config=config, calibration=False)
            server = stack.enter_context(running(upstream(arguments.service)))
            urls[name] = stack.enter_context(running(build_app(pruner, ProxyConfig(server, port=0, **options))))
        begin, names = time.monotonic(), list(ARMS)

        def live(client: int) -> None:
            rng = random.Random(client)
            time.sleep(rng.uniform(0, arguments.pause))
            while (now := time.monotonic() - begin) < 60 * arguments.minutes:
                name = names[int(now / arguments.turn) % len(names)]
                body, sent = {"messages": prompt(rng.randrange(10**6))}, time.monotonic()
                headers = {"authorization": f"Bearer {client}"}
                url = f"{urls[name]}/v1/chat/completions"
                httpx2.post(url, json=body, headers=headers, timeout=120).raise_for_status()
                taken[name].append(time.monotonic() - sent)
                time.sleep(rng.expovariate(1 / arguments.pause))

        threads = [threading.Thread(target=live, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcomes = {each: counted(urls[names[1]], each) for each in ("agreed", "interrupted", "dropped", "failed")}
    told = {
        name: {"n": len(own), **{f"p{at}": round(float(np.percentile(own, at)), 3) for at in (50, 95, 99)}}
        for name, own in taken.items()
    }
    script.print_report("audit_latency", {"seconds": told, "audits": outcomes}, arguments.out)


if __name__ == "__main__":
    script.run(main)
