"""The OpenAI-compatible endpoint under many clients: right answers, nothing stuck, memory flat.

Every client sends its share of the requests one after the other: greedy chats and completions, whole and streamed,
conversations that go on, streams hung up after their first piece, and bad bodies. Every whole answer is compared with
the generator's own. About a minute for 200 requests on two cores.
"""

from __future__ import annotations

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
from openai import OpenAI

from spec_stack import SpecStackGenerator

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

    kinds: tuple[str, ...] = ("chat", "stream", "completion", "hang up", "bad body")

    def __init__(self, url: str, name: str, expected: Expected, load: Load, outcome: Outcome) -> None:
        self._url, self._expected, self._load, self._outcome = url, expected, load, outcome
        self._openai = OpenAI(base_url=f"{url}/v1", api_key=name, max_retries=0, timeout=300)
        self._rng = random.Random(f"{load.seed} {name}")

    def run(self, num_requests: int) -> None:
        for index in range(num_requests):
            kind = self.kinds[index % len(self.kinds)]
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

    def chat(self, messages: list[Any], **options: Any) -> str:
        return self._answer(messages=messages, **options)

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
    outcome.is_idle = becomes_idle(url)
    outcome.rss_growth_mb = (process.memory_info().rss - before) / 1e6
    return outcome


def becomes_idle(url: str, seconds: float = 30.0) -> bool:
    """Return whether nothing runs or waits any more."""
    end = monotonic() + seconds
    while monotonic() < end:
        with urlopen(f"{url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        if {"spec_stack_requests_running 0.0", "spec_stack_requests_waiting 0.0"} <= set(lines):
            return True
        sleep(0.1)
    return False
