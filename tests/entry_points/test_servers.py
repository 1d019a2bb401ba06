"""One prompt, one selection: at the server's and the proxy's endpoints as in `generate`."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from spec_stack import SpecStackGenerator
from tests.entry_points.conftest import Expected
from tests.entry_points.prompts import RATE, ROWS, Reads, Row, ids_of, lines_of, lines_of_prompt, rendered
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

CHATS = [name for name, row in ROWS.items() if row.messages]
UNPROTECTED = [name for name, row in ROWS.items() if not row.protected]
# The proxy prunes the turns of a conversation one after the other, so that each begins as the one before it.
ONE_TURN = [name for name, row in ROWS.items() if not any(each["role"] == "assistant" for each in row.messages)]


def post(url: str, body: dict[str, Any], **headers: str) -> None:
    assert httpx2.post(url, json=body, headers=headers, timeout=120).status_code == 200


def served(server: RunningApp, generator: SpecStackGenerator, row: Row, path: str, body: dict[str, Any]) -> Any:
    reads = Reads(generator)
    options = {} if row.question is None else {"question": row.question}
    with reads.of():
        post(f"{server.url}{path}", {**body, **options, "max_tokens": 1, "temperature": 0})
    return lines_of(reads.text())


@pytest.mark.parametrize("name", CHATS)
def test_a_served_chat(server: RunningApp, generator: SpecStackGenerator, expected: Expected, name: str) -> None:
    row = ROWS[name]
    body = {"messages": list(row.messages), **row.options}
    assert served(server, generator, row, "/v1/chat/completions", body) == expected(name)


@pytest.mark.parametrize("by", ["text", "ids"])
@pytest.mark.parametrize("name", UNPROTECTED)
def test_a_served_completion(
    server: RunningApp, generator: SpecStackGenerator, expected: Expected, name: str, by: str
) -> None:
    row = ROWS[name]
    prompt = rendered(generator, row) if by == "text" else ids_of(generator, row)
    assert served(server, generator, row, "/v1/completions", {"prompt": prompt}) == expected(name)


def proxied(proxy: RunningApp, upstream: FakeUpstream, row: Row, path: str, body: dict[str, Any]) -> Any:
    options = {"keep_rate": RATE, "question": row.question, "protect": [row.protected] if row.protected else []}
    given = {name: value for name, value in options.items() if value}
    post(f"{proxy.url}{path}", {"model": "m", "max_tokens": 1, **body, "spec_stack": given})
    return upstream.seen[-1].json


@pytest.mark.parametrize("name", [name for name in ONE_TURN if name in CHATS])
def test_a_proxied_chat(proxy: RunningApp, upstream: FakeUpstream, expected: Expected, name: str) -> None:
    row = ROWS[name]
    seen = proxied(proxy, upstream, row, "/v1/chat/completions", {"messages": list(row.messages), **row.options})
    assert lines_of_prompt(seen["messages"]) == expected(name)


@pytest.mark.parametrize("name", [name for name in ONE_TURN if name in CHATS and not ROWS[name].options])
def test_a_proxied_message_of_anthropics_api(
    proxy: RunningApp, upstream: FakeUpstream, expected: Expected, name: str
) -> None:
    system, *messages = ROWS[name].messages
    body = {"system": system["content"], "messages": messages}
    seen = proxied(proxy, upstream, ROWS[name], "/v1/messages", body)
    assert seen["system"] == system["content"]
    assert lines_of_prompt(seen["messages"]) == expected(name)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in CHATS])
def test_a_proxied_completion(proxy: RunningApp, upstream: FakeUpstream, expected: Expected, name: str) -> None:
    seen = proxied(proxy, upstream, ROWS[name], "/v1/completions", {"prompt": ROWS[name].text})
    assert lines_of_prompt(seen["prompt"]) == expected(name)
