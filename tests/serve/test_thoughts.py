"""Formats and forced calls behind a thought, over the endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance", reason="needs the extra `structured`")

from tests.serve.conftest import Server, served
from tests.support.thinking import THOUGHT, thinker
from tests.support.tools import TOOLS

REQUEST: dict[str, Any] = {
    "model": "spec-stack",
    "messages": [{"role": "user", "content": "Is it warm?"}],
    "temperature": 0,
    "max_tokens": 64,
}
SCHEMA = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    generator = thinker()
    with served(generator) as running:
        yield running


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
    ids=["json_schema", "tools"],
)
def test_the_content_keeps_to_the_format_whole_and_streamed(options: dict[str, Any], server: Server) -> None:
    create = server.client().chat.completions.create
    message = create(**REQUEST, **options).choices[0].message
    assert message.reasoning_content == THOUGHT.removesuffix("</think>")
    if "tools" in options:
        assert (len(message.tool_calls), message.content) == (1, None)
    else:
        assert json.loads(message.content) in ({"warm": True}, {"warm": False})
    deltas = [chunk.choices[0].delta for chunk in create(**REQUEST, **options, stream=True) if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
