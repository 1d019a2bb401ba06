"""Scoring is work among other work: it takes turns with running requests, and stops for whom it is not wanted."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import signature
from urllib.parse import urlparse

import pytest

from .conftest import Reference, Server, generate_body, wait_until


def test_running_requests_get_tokens_while_a_prompt_is_scored(server: Server, reference: Reference) -> None:
    """Between two chunks of scoring there is a decode step, so a chunk is the longest that one waits for it."""
    prompt = reference.prompt(1800, seed=41)
    num_told = 0

    def stream() -> None:
        nonlocal num_told
        for chunk in server.stream("/generate", generate_body(reference.prompt(60, seed=40), 250, gamma=0)):
            num_told = chunk["meta_info"]["completion_tokens"]

    running = threading.Thread(target=stream)
    running.start()
    wait_until(lambda: num_told > 5)
    before = num_told
    reply = server.generate(prompt, 1, sparse_prefill="on", keep_rate=0.1)
    num_meanwhile = num_told - before
    running.join()
    assert reply["meta_info"]["spec_stack"]["num_scored_tokens"] == len(prompt)
    # Seven chunks of 256, then the look-ahead and the prefill. Tokens, since a slow client gets several at a time.
    assert num_meanwhile >= 6
    assert reply["output_ids"] == reference.tokens(prompt, sparse_prefill="on", keep_rate=0.1)[:1]


@contextmanager
def _paused(server: Server) -> Iterator[None]:
    """New requests wait outside SGLang's scheduler for the block, and come to it all at once after it."""
    assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
    try:
        yield
    finally:
        assert server.post("/continue_generation", {})[0] == 200


def _num_waiting(server: Server) -> int:
    return int(server.state()["num_waiting_for_their_score"])


def test_prompts_of_clients_that_hang_up_are_not_scored(server: Server, reference: Reference) -> None:
    before = server.state()["num_requests"]["pruned"]
    address = urlparse(server.url)
    clients = []
    with _paused(server):
        for seed in range(12):
            # SGLang notices at once that a stream's client has gone, and others within four seconds.
            request = {**generate_body(reference.prompt(3000, seed=50 + seed), 4, sparse_prefill="on"), "stream": True}
            body = json.dumps(request).encode()
            client = socket.create_connection((address.hostname, address.port))
            head = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            clients.append(client)
        time.sleep(1)
    for client in clients:
        client.close()
    short = reference.prompt(40, seed=49)
    assert server.generate(short, 4)["output_ids"] == reference.tokens(short)[:4]
    wait_until(lambda: _num_waiting(server) == 0)
    # Those that ran, and what a slow machine scores before it hears of the closed streams.
    assert server.state()["num_requests"]["pruned"] <= before + len(clients) // 2


def test_an_empty_cache_and_a_pause_find_no_scoring_in_their_way(server: Server, reference: Reference) -> None:
    """Slots that a scoring holds are given back before SGLang empties its pools; it begins anew after the pause."""
    from sglang.srt.managers.scheduler import Scheduler

    num_waiting = 0
    # A machine may score all of them between two looks: then others are asked for.
    for attempt in range(5):
        prompts = [reference.prompt(1500, seed=600 + 8 * attempt + number) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            with _paused(server):
                replies = [pool.submit(server.generate, prompt, 8, sparse_prefill="on") for prompt in prompts]
                time.sleep(1)
            with _paused(server):
                # SGLang 0.5.20 empties nothing while requests wait, paused or not.
                if "ignore_waiting" in signature(Scheduler.is_fully_idle).parameters:
                    server.flush()
                num_waiting = _num_waiting(server)
        scored = [reply.result()["meta_info"]["spec_stack"]["num_scored_tokens"] for reply in replies]
        assert scored == [len(prompt) for prompt in prompts]
        for prompt, reply in list(zip(prompts, replies, strict=True))[::3]:
            assert reply.result()["output_ids"] == reference.tokens(prompt, sparse_prefill="on")[:8]
        if num_waiting:
            return
    pytest.skip("this machine scores eight prompts sooner than it can be asked to pause")


def test_equal_prompts_at_once_are_scored_once(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(1500, seed=65)
    replies = server.generate_all([(prompt, {"sparse_prefill": "on", "max_new_tokens": 8})] * 4)
    assert sorted(reply["meta_info"]["spec_stack"]["num_scored_tokens"] for reply in replies) == [0, 0, 0, len(prompt)]
    for reply in replies:
        assert reply["output_ids"] == reference.tokens(prompt, sparse_prefill="on")[:8]
