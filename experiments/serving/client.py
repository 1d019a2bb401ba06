"""A client of SGLang's own /generate that streams and times every chunk; and a prompt of real text."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter, sleep
from typing import Any

from experiments.serving.server import HOST, ServerError
from spec_stack.bench.demo import hide_fact
from spec_stack.hf.prompt import encode_messages


@dataclass
class Answer:
    """One streamed reply. chunk_times: of every chunk, on the clock of this process."""

    started: float
    chunk_times: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.chunk_times[0] - self.started


class Client:
    """Asks a server on loopback by token ids. limit_s: how long it waits for the next piece of a reply. extra_key: the
    wall behind which its prompts stand; `explain` tells what a follow-up inherits behind one only."""

    def __init__(self, port: int, limit_s: float = 300.0, extra_key: str | None = None) -> None:
        self._port = port
        self._limit_s = limit_s
        self._wall = {} if extra_key is None else {"extra_key": extra_key}

    def ask(self, input_ids: Sequence[int], num_new: int, may_end: bool = False, **custom: Any) -> Answer:
        """Stream a greedy reply of num_new tokens, or of fewer where it may end. Raises OSError where none comes."""
        answer = Answer(perf_counter())
        connection = http.client.HTTPConnection(HOST, self._port, timeout=self._limit_s)
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": not may_end}
        sampling["custom_params"] = {"spec_stack": custom}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True, **self._wall}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                chunk = json.loads(data)
                answer.chunk_times.append(perf_counter())
                answer.output_ids, answer.meta_info = chunk["output_ids"], chunk["meta_info"]
        connection.close()
        return answer

    def forget(self) -> None:
        """Empty the server's caches. Raises ServerError where it still works after 20 seconds."""
        for _ in range(40):
            connection = http.client.HTTPConnection(HOST, self._port, timeout=self._limit_s)
            connection.request("POST", "/flush_cache")
            status = connection.getresponse().status
            connection.close()
            if status == HTTPStatus.OK:
                return
            sleep(0.5)
        raise ServerError("the server does not empty its caches, since it is not idle")


def document(tokenizer: Any, num_tokens: int, seed: int) -> list[int]:
    """A chat about a document of real text, as token ids."""
    return encode_messages(tokenizer, hide_fact(tokenizer, num_tokens, seed).messages).token_ids
