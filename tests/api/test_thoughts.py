"""Answers by a format behind a thought that the template opens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from tests.support.thinking import THOUGHT, thinker
from tests.support.tools import TOOLS

pytest.importorskip("xgrammar", reason="needs the extra `structured`")
CHAT = [{"role": "user", "content": "Is it warm?"}]
SCHEMA = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    {"type": "regex", "pattern": "(yes|no), it is"},
    {"type": "grammar", "grammar": 'root ::= "<" inner ">"\ninner ::= "yes" | "no"'},
]


@pytest.fixture(scope="module")
def generator() -> SpecStackGenerator:
    return thinker()


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form["type"])
def test_the_format_holds_behind_the_thought(form: dict[str, Any], gamma: int, generator: SpecStackGenerator) -> None:
    result = generator.generate(messages=CHAT, response_format=form, max_tokens=64, gamma=gamma)
    assert result.text == f"{THOUGHT}\n\n{result.content}"
    assert result.reasoning == THOUGHT.removesuffix("</think>")
    assert result.finish_reason == "eos"
    if form["type"] == "json_schema":
        assert json.loads(result.content) in ({"warm": True}, {"warm": False})
    else:
        assert result.content in ("yes, it is", "no, it is", "<yes>", "<no>")
    streamed = generator.stream(messages=CHAT, response_format=form, max_tokens=64, gamma=gamma)
    assert "".join(output.text for output in streamed) == result.text


def test_any_object_comes_as_the_content(generator: SpecStackGenerator) -> None:
    result = generator.generate(messages=CHAT, response_format={"type": "json_object"}, max_tokens=24)
    assert result.content.startswith("{")
    assert result.reasoning


def test_a_call_is_forced_behind_the_thought(generator: SpecStackGenerator) -> None:
    result = generator.generate(messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=64)
    assert (len(result.tool_calls), result.content, result.finish_reason) == (1, "", "eos")
    assert result.text.startswith(f"{THOUGHT}\n\n<tool_call>")


def test_a_budget_that_ends_inside_the_thought_leaves_no_content(generator: SpecStackGenerator) -> None:
    for options in ({"response_format": FORMATS[0]}, {"tools": TOOLS, "tool_choice": "required"}):
        more: dict[str, Any] = options
        result = generator.generate(messages=CHAT, max_tokens=3, **more)
        assert (result.finish_reason, result.content, result.tool_calls) == ("length", "", [])
        assert THOUGHT.startswith(result.reasoning)


def test_a_thought_that_the_template_leaves_out_has_no_part_in_it(generator: SpecStackGenerator) -> None:
    result = generator.generate(
        messages=CHAT, response_format=FORMATS[0], max_tokens=64, chat_template_kwargs={"enable_thinking": False}
    )
    assert (json.loads(result.content).keys(), result.reasoning) == ({"warm"}, "")
