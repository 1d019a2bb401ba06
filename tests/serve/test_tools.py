"""Agents over the endpoint, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("xgrammar", reason="forced calls need the extra `structured`")

from spec_stack import SpecStackGenerator
from spec_stack.serve.app import open_nursery
from spec_stack.serve.config import ServeConfig
from tests.serve.conftest import Server
from tests.support.tools import TEMPLATE, TOOLS

CHAT = [{"role": "user", "content": "Where is it warm?"}]
ASKED: dict[str, Any] = {"model": "spec-stack", "temperature": 0, "max_tokens": 64, "tools": TOOLS}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", calibration=False)
    generator.tokenizer.chat_template = TEMPLATE
    generator = SpecStackGenerator(generator.pair.target, generator.pair.draft, generator.tokenizer)
    nursery = open_nursery(generator)
    running = Server(generator, ServeConfig(port=0), nursery)
    yield running
    running.stop()
    nursery.stop()


def test_a_forced_call_is_the_same_whole_and_streamed(server: Server) -> None:
    create = server.client().chat.completions.create
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        whole = create(messages=CHAT, tool_choice=choice, **ASKED).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        (call,) = whole.message.tool_calls
        chunks = list(create(messages=CHAT, tool_choice=choice, stream=True, **ASKED))
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        assert {delta.index for delta in deltas} == {0}
        assert deltas[0].function.name == call.function.name
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert isinstance(json.loads(call.function.arguments), dict)


def test_an_agents_turns_go_on_in_its_session(server: Server) -> None:
    client, messages, known = server.client("agent"), list[Any](CHAT), 0
    for _ in range(3):
        answer = client.chat.completions.create(messages=messages, tool_choice="required", **ASKED)
        assert answer.usage.prompt_tokens_details.cached_tokens >= known
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        message = answer.choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "24"} for call in message.tool_calls]


def test_tool_choices_that_mean_nothing_are_refused(server: Server) -> None:
    create = server.client().chat.completions.create
    for options, message in (
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "the tools are look_up, add"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "not both"),
    ):
        with pytest.raises(Exception, match=message):
            create(messages=CHAT, **(ASKED | options))
