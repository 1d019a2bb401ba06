"""Unusual messages: taken alike or refused alike by `generate`, by `Pruner` and at the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from spec_stack import Pruner, SpecStackGenerator
from tests.support.running_app import RunningApp
from tests.support.upstream import FakeUpstream

CHAT = "/v1/chat/completions"
TEXT = "What is the code of room 7?"
TAKEN: dict[str, list[Any]] = {
    "a string among parts": [{"role": "user", "content": [TEXT]}],
    "strings and parts": [{"role": "user", "content": ["Room 7.", {"type": "text", "text": TEXT}]}],
    "half a character": [{"role": "user", "content": f"{TEXT} \ud83d"}],
    "two halves in the wrong order": [{"role": "user", "content": f"{TEXT} \ude00\ud83d"}],
    "a character of two halves": [{"role": "user", "content": f"{TEXT} \U0001f600"}],
    "the escape of half a character as text": [{"role": "user", "content": f"{TEXT} \\ud83d \\\\ud83d"}],
    "a byte order mark": [{"role": "user", "content": f"\ufeff{TEXT}\r\n"}],
    "a custom call and results without ids": [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "room 7"}}]},
        {"role": "tool", "content": "62"},
        {"role": "tool", "content": "63"},
    ],
    "two users in a row": [{"role": "user", "content": TEXT}, {"role": "user", "content": TEXT}],
}
REFUSED: dict[str, Any] = {
    **{
        f"content {content!r}": [{"role": "user", "content": content}]
        for content in (0, None, {"text": TEXT}, [TEXT, 5], [{"type": "text"}, TEXT], [{"type": "text", "text": 5}])
    },
    "no role": [{"content": TEXT}],
    "a number for a role": [{"role": 1, "content": TEXT}],
    "a text among messages": [{"role": "user", "content": TEXT}, "hello"],
    "a call without a function": [{"role": "user", "content": TEXT}, {"role": "assistant", "tool_calls": [{"id": 1}]}],
    "no message": [],
}


def prompt_tokens(server: RunningApp, messages: Any) -> int:
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    response = httpx2.post(f"{server.url}{CHAT}", content=body, timeout=120)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("name", TAKEN)
def test_what_one_takes_all_take(generator: SpecStackGenerator, pruner: Pruner, server: RunningApp, name: str) -> None:
    messages = TAKEN[name]
    num_tokens = generator.generate(messages=messages, max_tokens=1).metrics.num_prompt_tokens
    assert prompt_tokens(server, messages) == num_tokens
    result = pruner.prune(messages, keep_rate=1)
    assert (result.messages, result.num_tokens) == (messages, num_tokens)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_refuses_all_refuse_in_one_line(
    generator: SpecStackGenerator, pruner: Pruner, server: RunningApp, name: str
) -> None:
    messages, said = REFUSED[name], []
    calls: list[Callable[[], object]] = [
        lambda: generator.generate(messages=messages, max_tokens=1),
        lambda: next(generator.stream(messages=messages)),
        lambda: pruner.prune(messages, keep_rate=0.5),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^.+$") as refusal:
            call()
        said.append(str(refusal.value))
    response = httpx2.post(f"{server.url}{CHAT}", json={"messages": messages}, timeout=120)
    assert response.status_code == 400
    assert all("\n" not in each for each in (*said, response.json()["error"]["message"]))


def test_half_a_character_is_read_as_a_replacement_character(generator: SpecStackGenerator, server: RunningApp) -> None:
    half, whole = f"x = '\ud83d'  # {TEXT}\n", f"x = '\ufffd'  # {TEXT}\n"
    token_ids = [generator.generate(text, max_tokens=8, question=text).token_ids for text in (half, whole)]
    assert token_ids[0] == token_ids[1]
    chats = [[{"role": "user", "content": text}] for text in (half, whole)]
    answers = [generator.generate(messages=chat, max_tokens=8).text for chat in chats]
    assert answers[0] == answers[1]
    body = json.dumps({"messages": chats[0], "max_tokens": 8, "temperature": 0, "stop": ["\ud83d"]}).encode()
    response = httpx2.post(f"{server.url}{CHAT}", content=body, timeout=120).json()
    assert answers[0].startswith(response["choices"][0]["message"]["content"])


def test_strings_among_parts_are_pruned_as_parts_are(pruner: Pruner, proxy: RunningApp, upstream: FakeUpstream) -> None:
    rooms = "\n".join(f"The code of room {number} is {number * 7 + 13}." for number in range(60))
    as_parts = [{"role": "user", "content": [{"type": "text", "text": rooms}, {"type": "text", "text": TEXT}]}]
    as_strings = [{"role": "user", "content": [rooms, TEXT]}]
    wanted, found = (pruner.prune(messages, keep_rate=0.3) for messages in (as_parts, as_strings))
    assert found.messages == [{"role": "user", "content": [part["text"] for part in wanted.messages[0]["content"]]}]
    assert found.kept == wanted.kept
    body = {"messages": as_strings, "spec_stack": {"keep_rate": 0.3}}
    assert httpx2.post(f"{proxy.url}{CHAT}", json=body, timeout=120).status_code == 200
    shorter = upstream.seen[-1].json["messages"][0]["content"]
    assert shorter == pruner.prune(as_strings, keep_rate=0.3, marker="").messages[0]["content"]
