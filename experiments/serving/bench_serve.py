"""The OpenAI-compatible endpoint under many clients: right answers, nothing stuck, memory flat.

Every client sends its share of the requests one after the other: greedy chats and completions, whole and streamed,
conversations that go on, streams hung up after their first piece, and bad bodies. Every whole answer is compared with
the generator's own. About a minute for 200 requests on two cores.

python -m experiments.serving.bench_serve --clients 8 --requests 200
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import uvicorn
from openai import OpenAI

from spec_stack import SpecStackGenerator
from spec_stack.serve.app import build_app
from spec_stack.serve.config import ServeConfig

QUESTIONS = ("Where does Bruno live?", "What is the red code for Alice?", "Give three tips.", "Why?")
PROMPTS = ("def read_lines(path):\n", "import os\n", "Once upon a time", "class Stack:\n    ")
BAD_BODIES = (b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "max_tokens": 0}', b'{"prompt": "a", "gamma": 99}')
_GREEDY: dict[str, Any] = {"model": "spec-stack", "temperature": 0}


@dataclass(frozen=True)
class Load:
    """The requests. num_requests: of all clients together."""

    num_clients: int = 8
    num_requests: int = 200
    max_tokens: int = 12
    seed: int = 0


@dataclass
class Outcome:
    """The outcome.

    counts: requests by kind. num_wrong: answers other than the generator's. num_unexpected: what else went wrong.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_unexpected: list[str] = field(default_factory=list)
    is_idle: bool = False
    rss_growth_mb: float = 0.0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Client:
    """Sends one client's requests."""

    def __init__(self, url: str, name: str, expected: Expected, load: Load, outcome: Outcome) -> None:
        self._url, self._expected, self._load, self._outcome = url, expected, load, outcome
        self._openai = OpenAI(base_url=f"{url}/v1", api_key=name, max_retries=0, timeout=300)
        self._rng = random.Random(f"{load.seed} {name}")

    def run(self, num_requests: int) -> None:
        kinds = ("chat", "stream", "completion", "hang up", "bad body")
        for index in range(num_requests):
            kind = kinds[index % len(kinds)]
            started = monotonic()
            try:
                right = getattr(self, "_" + kind.replace(" ", "_"))()
            except Exception as error:
                # A load test counts whatever goes wrong, and goes on.
                self._outcome.num_unexpected.append(f"{kind}: {error!r}")
                right = True
            self._outcome.counts[kind] += 1
            self._outcome.num_wrong += not right
            self._outcome.latencies_s.append(monotonic() - started)

    def _chat(self) -> bool:
        messages: list[Any] = [{"role": "user", "content": self._rng.choice(QUESTIONS)}]
        text = ""
        for follow_up in (None, self._rng.choice(QUESTIONS)):
            if follow_up is not None:
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
            answer = self._openai.chat.completions.create(
                messages=messages, max_tokens=self._load.max_tokens, **_GREEDY
            )
            text = answer.choices[0].message.content or ""
            if text != self._expected.chat(messages):
                return False
        return True

    def _stream(self) -> bool:
        prompt = self._rng.choice(PROMPTS)
        pieces = self._openai.completions.create(
            prompt=prompt, max_tokens=self._load.max_tokens, stream=True, **_GREEDY
        )
        text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        return text == self._expected.completion(prompt)

    def _completion(self) -> bool:
        prompt = self._rng.choice(PROMPTS)
        answer = self._openai.completions.create(prompt=prompt, max_tokens=self._load.max_tokens, **_GREEDY)
        return answer.choices[0].text == self._expected.completion(prompt)

    def _hang_up(self) -> bool:
        stream = self._openai.completions.create(
            prompt=self._rng.choice(PROMPTS), max_tokens=3000, stream=True, extra_body={"ignore_eos": True}, **_GREEDY
        )
        next(iter(stream))
        stream.close()
        return True

    def _bad_body(self) -> bool:
        path = self._rng.choice(("/v1/chat/completions", "/v1/completions"))
        body = self._rng.choice(BAD_BODIES)
        request = Request(self._url + path, body, {"Content-Type": "application/json"})
        try:
            urlopen(request, timeout=300).close()
        except HTTPError as error:
            return error.code == 400 and json.loads(error.read())["error"]["type"] == "invalid_request_error"
        return False


class Expected:
    """The generator's own answers, each made once."""

    def __init__(self, generator: SpecStackGenerator, max_tokens: int) -> None:
        self._generator, self._max_tokens = generator, max_tokens
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def chat(self, messages: list[Any]) -> str:
        return self._answer(messages=messages)

    def completion(self, prompt: str) -> str:
        return self._answer(prompt=prompt)

    def _answer(self, **prompt: Any) -> str:
        key = json.dumps(prompt)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._generator.generate(**prompt, max_tokens=self._max_tokens).text
            return self._known[key]


def run_load(url: str, generator: SpecStackGenerator, load: Load) -> Outcome:
    """Send a load to a server in this process, over this generator, and see what comes of it."""
    outcome, expected = Outcome(), Expected(generator, load.max_tokens)
    process, started = psutil.Process(), monotonic()
    before = process.memory_info().rss
    shares = [load.num_requests // load.num_clients] * load.num_clients
    shares[0] += load.num_requests - sum(shares)
    with ThreadPoolExecutor(load.num_clients) as pool:
        clients = [Client(url, f"client {index}", expected, load, outcome) for index in range(load.num_clients)]
        list(pool.map(lambda pair: pair[0].run(pair[1]), zip(clients, shares, strict=True)))
    outcome.seconds = monotonic() - started
    outcome.is_idle = _becomes_idle(url)
    outcome.rss_growth_mb = (process.memory_info().rss - before) / 1e6
    return outcome


def _becomes_idle(url: str, seconds: float = 30.0) -> bool:
    """Return whether nothing runs or waits any more."""
    end = monotonic() + seconds
    while monotonic() < end:
        with urlopen(f"{url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        if {"spec_stack_requests_running 0.0", "spec_stack_requests_waiting 0.0"} <= set(lines):
            return True
        sleep(0.1)
    return False


def in_use_mb() -> float:
    """Return what is resident once the allocator has given back what is free: what it holds back grows by chance."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=Load.num_clients)
    parser.add_argument("--requests", type=int, default=Load.num_requests)
    parser.add_argument("--rounds", type=int, default=6, help="how often; memory is flat where it stops growing")
    arguments = parser.parse_args()
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32")
    server = uvicorn.Server(uvicorn.Config(build_app(generator, ServeConfig()), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    run_load(url, generator, Load(arguments.clients, 5 * arguments.clients, seed=1))
    for repeat in range(arguments.rounds):
        outcome = run_load(url, generator, Load(arguments.clients, arguments.requests, seed=2 + repeat))
        latencies = sorted(outcome.latencies_s)
        print(f"{dict(outcome.counts)} in {outcome.seconds:.1f} s")
        print(f"  median {latencies[len(latencies) // 2]:.2f} s, longest {latencies[-1]:.2f} s")
        print(f"  {outcome.num_wrong} wrong, unexpected: {outcome.num_unexpected or 'nothing'}")
        print(f"  idle afterwards: {outcome.is_idle}; memory {outcome.rss_growth_mb:+.1f} MB, {in_use_mb():.0f} in use")
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
