"""Many clients at once, well-behaved and not, that compare every answer with the generator's own.

A client sends its requests one after the other: greedy chats and completions, whole and streamed, conversations that go
on, streams hung up after their first piece, chats with tools, and bad bodies.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from openai import OpenAI

from spec_stack import SpecStackGenerator
from tests.serve.conftest import Server
from tests.support.running_app import until
from tests.support.tools import TOOLS

MAX_TOKENS = 12
QUESTIONS = ("Where does Bruno live?", "What is the red code for Alice?", "Give three tips.", "Why?")
PROMPTS = ("def read_lines(path):\n", "import os\n", "Once upon a time", "class Stack:\n    ")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAD_BODIES = (b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "max_tokens": 0}', b'{"prompt": "a", "gamma": 99}')
_GREEDY: dict[str, Any] = {"model": "spec-stack", "temperature": 0}


class Expected:
    """The generator's own answers, each made once."""

    def __init__(self, generator: SpecStackGenerator) -> None:
        self._generator, self._known, self._lock = generator, dict[str, str](), threading.Lock()

    def __call__(self, **prompt: Any) -> str:
        key = json.dumps(prompt)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._generator.generate(**prompt, max_tokens=MAX_TOKENS).text
            return self._known[key]


class Client:
    """Sends one client's requests. counts: of them, by kind. faults: what went otherwise than it should."""

    kinds: tuple[str, ...] = ("chat", "stream", "completion", "hang_up", "tools", "bad_body")

    def __init__(self, url: str, name: str, expected: Expected) -> None:
        self._url, self._expected, self._rng = url, expected, random.Random(name)
        self._openai = OpenAI(base_url=f"{url}/v1", api_key=name, max_retries=0, timeout=300)
        self.counts, self.faults = Counter[str](), list[str]()

    def run(self) -> None:
        """Send a request of each kind."""
        for kind in self.kinds:
            self.counts[kind] += 1
            try:
                if not getattr(self, f"_{kind}")():
                    self.faults.append(f"{kind}: another answer")
            except Exception as error:
                # A load test counts whatever goes wrong, and goes on.
                self.faults.append(f"{kind}: {error!r}")

    def _chat(self) -> bool:
        messages: list[Any] = []
        for _ in range(2):
            messages.append({"role": "user", "content": self._rng.choice(QUESTIONS)})
            answer = self._openai.chat.completions.create(messages=messages, max_tokens=MAX_TOKENS, **_GREEDY)
            text = answer.choices[0].message.content or ""
            if text != self._expected(messages=messages):
                return False
            messages.append({"role": "assistant", "content": text})
        return True

    def _tools(self) -> bool:
        messages: list[Any] = [{"role": "user", "content": self._rng.choice(QUESTIONS)}]
        create = self._openai.chat.completions.create
        answer = create(messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS, **_GREEDY)
        return answer.choices[0].message.content == self._expected(messages=messages, tools=TOOLS)

    def _stream(self) -> bool:
        prompt = self._rng.choice(PROMPTS)
        pieces = self._openai.completions.create(prompt=prompt, max_tokens=MAX_TOKENS, stream=True, **_GREEDY)
        text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        return text == self._expected(prompt=prompt)

    def _completion(self) -> bool:
        prompt = self._rng.choice(PROMPTS)
        answer = self._openai.completions.create(prompt=prompt, max_tokens=MAX_TOKENS, **_GREEDY)
        return answer.choices[0].text == self._expected(prompt=prompt)

    def _hang_up(self) -> bool:
        stream = self._openai.completions.create(
            prompt=self._rng.choice(PROMPTS), max_tokens=3000, stream=True, extra_body={"ignore_eos": True}, **_GREEDY
        )
        next(iter(stream))
        stream.close()
        return True

    def _bad_body(self) -> bool:
        return self._status(self._rng.choice((CHAT, TEXT)), self._rng.choice(BAD_BODIES)) == 400

    def _status(self, path: str, body: bytes) -> int:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._openai.api_key}"}
        try:
            with urlopen(Request(self._url + path, body, headers), timeout=300) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code if json.loads(error.read())["error"]["type"] == "invalid_request_error" else 0


def is_idle(url: str) -> bool:
    """Return whether nothing runs or waits any more."""
    with urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {"spec_stack_requests_running 0.0", "spec_stack_requests_waiting 0.0"} <= set(lines)


@pytest.mark.slow
def test_eight_clients_with_mixed_requests_get_right_answers_and_leave_nothing_behind(
    embedded: SpecStackGenerator, start: Callable[..., Server]
) -> None:
    url, expected = start().url, Expected(embedded)

    def run(seed: int) -> list[str]:
        clients = [Client(url, f"client {at}, seed {seed}", expected) for at in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Client.run, clients))
        return [fault for client in clients for fault in client.faults]

    assert run(1) == []
    before = psutil.Process().memory_info().rss
    assert run(2) == []
    until(lambda: is_idle(url), 30)
    # The caches of the kept sessions come and go.
    assert psutil.Process().memory_info().rss - before < 60e6
