"""The proxy under a hundred hostile bodies, and under twenty clients at once."""

from __future__ import annotations

import gc
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import httpx2
import psutil
import pytest
from openai import OpenAI

from tests.proxy.conftest import Start
from tests.proxy.test_pruning import CHAT, CODE, post
from tests.serve.hostile import chat, hostile
from tests.support.upstream import EVENTS, FakeUpstream

pytestmark = pytest.mark.slow
logger = logging.getLogger(__name__)


def test_hostile_bodies_harm_nobody_and_are_upstreams_to_refuse(start: Start, upstream: FakeUpstream) -> None:
    url, over = start().url, threading.Event()
    post(url, CHAT, {"messages": [{"role": "user", "content": CODE}]}, authorization="Bearer normal")
    meanwhile: list[float] = []

    def normal() -> None:
        while not over.is_set():
            began = monotonic()
            assert post(url, CHAT, chat()[1], authorization="Bearer normal").status_code == 200
            meanwhile.append(monotonic() - began)
            over.wait(0.05)

    other, before, taken = threading.Thread(target=normal), psutil.Process().memory_info().rss, []
    other.start()
    statuses = []
    longest = max(hostile(), key=lambda request: len(request[1]))
    for path, body in dict.fromkeys((*hostile()[1::3], longest)):
        began = monotonic()
        statuses.append(post(url, path, body, authorization="Bearer hostile").status_code)
        taken.append(monotonic() - began)
        # Nothing of a hostile body is kept by the test itself.
        upstream.seen.clear()
    over.set()
    other.join()
    # The upstream server takes all that is an object; the proxy refuses the one body that is too long.
    assert set(statuses) == {200, 400, 413}
    assert statuses.count(413) == 1
    gc.collect()
    grown_mb = (psutil.Process().memory_info().rss - before) / 1e6
    figures = {"longest_s": max(taken), "longest_beside_s": max(meanwhile), "grown_mb": grown_mb}
    logger.info(json.dumps(figures))
    assert max(meanwhile) < 30
    assert grown_mb < 400
    assert httpx2.get(f"{url}/health", timeout=60).status_code == 200


def test_twenty_clients_at_once_are_all_answered(start: Start, upstream: FakeUpstream) -> None:
    url = start().url

    def converse(name: int) -> int:
        client = OpenAI(base_url=f"{url}/v1", api_key=f"client {name}", max_retries=0, timeout=300)
        options: dict[str, Any] = {"model": "m", "extra_headers": {"x-client": str(name)}}
        text = f"{CODE if name % 4 == 0 else ''}\nI am client {name}."
        messages: list[Any] = [{"role": "user", "content": text}]
        for turn in range(4):
            if turn % 2:
                chunks = list(client.chat.completions.create(messages=messages, stream=True, **options))
                assert len(chunks) == len(EVENTS) - 1
            else:
                assert client.chat.completions.create(messages=messages, **options).choices[0].message.content
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"And {turn}?"}]
        return name

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(converse, range(20))) == list(range(20))
    assert len(upstream.seen) == 80
    for seen in upstream.seen:
        # Nobody gets another's prompt.
        assert f"I am client {seen.headers['x-client']}." in seen.json["messages"][0]["content"]
        assert seen.headers["authorization"] == f"Bearer client {seen.headers['x-client']}"
    lines = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    assert 'spec_stack_requests_total{outcome="ok"} 80.0' in lines
    assert "spec_stack_prompts_waiting 0.0" in lines
