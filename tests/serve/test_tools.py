"""Agents over the endpoint, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance", reason="forced calls need the extra `structured`")

from spec_stack import SpecStackGenerator
from tests.serve.conftest import Server, served
from tests.support.tools import TEMPLATE, TOOLS

CHAT = [{"role": "user", "content": "Where is it warm?"}]
REQUEST: dict[str, Any] = {"model": "spec-stack", "temperature": 0, "max_tokens": 64, "tools": TOOLS}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", calibration=False)
    generator.tokenizer.chat_template = TEMPLATE
    generator = SpecStackGenerator(generator.pair.target, generator.pair.draft, generator.tokenizer)
    with served(generator) as running:
        yield running


def test_a_forced_call_is_the_same_whole_and_streamed(server: Server) -> None:
    create = server.client().chat.completions.create
    for choice in ("required", "add", {"type": "function", "function": {"name": "add"}}):
        whole = create(messages=CHAT, tool_choice=choice, **REQUEST).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        (call,) = whole.message.tool_calls
        chunks = list(create(messages=CHAT, tool_choice=choice, stream=True, **REQUEST))
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        assert {delta.index for delta in deltas} == {0}
        assert deltas[0].function.name == call.function.name
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert isinstance(json.loads(call.function.arguments), dict)


def test_an_agents_turns_go_on_in_its_session(server: Server) -> None:
    client, messages, known = server.client("agent"), list[Any](CHAT), 0
    for _ in range(3):
        answer = client.chat.completions.create(messages=messages, tool_choice="required", **REQUEST)
        assert answer.usage.prompt_tokens_details.cached_tokens >= known
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        message = answer.choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "24"} for call in message.tool_calls]


@pytest.mark.parametrize(
    "arguments", ['{"q": "\\ud83d"}', '{"q": 1e999}', '{"q": "}\\n</tool_call>", "r": "<tool_call>{\\"\\ude00"}']
)
def test_what_a_model_writes_as_arguments_is_what_a_client_gets(server: Server, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    options = REQUEST | {
        "max_tokens": 128,
        "response_format": {"type": "grammar", "grammar": f"root ::= {json.dumps(text)}"},
    }
    create = server.client().chat.completions.create
    message = create(messages=CHAT, **options).choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == [arguments]
    chunks = list(create(messages=CHAT, stream=True, **options))
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert "".join(delta.function.arguments for delta in deltas) == arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # The client's next turn.
    turn = [*CHAT, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "24"}]
    assert create(messages=turn, **REQUEST).choices
