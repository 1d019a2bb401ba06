"""Tools that an answer must call, and calls in its result."""

from __future__ import annotations

import json

import pytest

from spec_stack import SpecStackGenerator
from tests.support.tools import TEMPLATE, TOOLS

pytest.importorskip("llguidance", reason="forced calls need the extra `structured`")
CHAT = [{"role": "user", "content": "Where is it warm?"}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> SpecStackGenerator:
    """The embedded pair, whose template calls tools here."""
    plain = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", calibration=False)
    plain.tokenizer.chat_template = TEMPLATE
    return SpecStackGenerator(plain.pair.target, plain.pair.draft, plain.tokenizer)


def test_a_forced_tool_is_called_with_arguments_that_fit(caller: SpecStackGenerator) -> None:
    for choice, names in (
        ("required", {"look_up", "add"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
        ("add", {"add"}),
    ):
        result = caller.generate(messages=CHAT, tools=TOOLS, tool_choice=choice, max_tokens=64)
        (call,) = result.tool_calls
        assert (result.content, result.finish_reason) == ("", "eos")
        assert call.name in names
        arguments = json.loads(call.arguments)
        assert arguments.get("place") in ("Vienna", "Rome") or 0 <= arguments["a"] <= 99
        # What was generated is what the template writes of it: the next turn finds it in a session's cache.
        parsed = {"function": {"name": call.name, "arguments": arguments}}
        again = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [parsed]}]
        rendered = caller.tokenizer.apply_chat_template(again, tools=TOOLS, tokenize=False)
        assert f"<|assistant|>{result.text}<|end|>" in rendered


def test_a_turn_behind_a_call_goes_on_in_its_session(caller: SpecStackGenerator) -> None:
    with caller.session() as session:
        first = session.generate(messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=64)
        messages = [
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": [call.as_dict() for call in first.tool_calls]},
            {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "24 degrees"},
        ]
        second = session.generate(messages=messages, tools=TOOLS, max_tokens=4)
    assert second.metrics.num_cached_tokens >= first.metrics.num_prompt_tokens + len(first.token_ids) - 1


def test_a_choice_that_cannot_be_forced_is_refused_before_any_work(
    caller: SpecStackGenerator, embedded: SpecStackGenerator
) -> None:
    with pytest.raises(ValueError, match="needs tools"):
        caller.generate(messages=CHAT, tool_choice="required")
    with pytest.raises(ValueError, match="not both"):
        caller.generate(messages=CHAT, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    with pytest.raises(ValueError, match="does not show how this model calls tools"):
        embedded.generate(messages=CHAT, tools=TOOLS, tool_choice="required")
    without = caller.generate(messages=CHAT, tools=TOOLS, tool_choice="none", max_tokens=1).metrics.num_prompt_tokens
    assert without == caller.generate(messages=CHAT, max_tokens=1).metrics.num_prompt_tokens
    text = embedded.generate("def f", max_tokens=3)
    assert (text.content, text.reasoning, text.tool_calls) == (text.text, "", [])
