"""Audits of `serve`: lost answers turn a route's pruning off."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.process_pool import RequestPool
from tests.proxy.test_audits import counted
from tests.serve.conftest import Server
from tests.support.running_app import until

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
ROOMS = "\n".join(f"The code of room {number} is {number * 7 + 13}." for number in range(60))


def chat(url: str, messages: Any, **options: object) -> tuple[str, str]:
    """The answer and the reason."""
    body = {"model": "spec-stack", "messages": messages, "temperature": 0, "max_tokens": 12, **options}
    response = httpx2.post(url + CHAT, content=json.dumps(body).encode(), timeout=120)
    return response.json()["choices"][0]["message"]["content"], response.headers["x-spec-stack-reason"]


def test_a_route_whose_answers_are_lost_is_dense(embedded: SpecStackGenerator, pool: RequestPool) -> None:
    config = SpecStackConfig(PrefillConfig(keep_rate=0.1, min_prompt_tokens=300))
    generator = SpecStackGenerator(
        embedded.target, embedded.draft, embedded.tokenizer, config=config, calibration=False
    )
    with Server(generator, ServeConfig(port=0, audit_rate=1.0, audit_max_loss=0.1, audit_idle_s=0.01), pool) as server:
        url = server.url
        for number in range(5):
            # The embedded pair loses codes of rooms.
            messages = [{"role": "user", "content": f"{ROOMS}\nContinue, please: {number}."}]
            text, reason = chat(url, messages)
            expected = generator.generate(messages=messages, max_tokens=12)
            assert (text, reason) == (expected.text, expected.metrics.sparse_prefill_reason)
            assert reason.startswith("on: ")
            until(lambda number=number: counted(url, "lost") + counted(url, "agreed") == number + 1)  # type: ignore[misc]
        assert counted(url, "lost") >= 3
        messages = [{"role": "user", "content": f"{ROOMS}\nContinue."}]
        text, reason = chat(url, messages)
        assert reason.startswith(f"off: audits of {CHAT} found more lost answers")
        assert text == generator.generate(messages=messages, max_tokens=12, sparse_prefill="off").text
        assert chat(url, messages, keep_rate=0.1)[1].startswith("on: ")
