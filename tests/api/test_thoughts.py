"""Thoughts between the marks of several templates, and answers by a format behind a thought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from tests.support.nightly import others_nightly
from tests.support.thinking import ANSWER, MARKED, REASONING, THOUGHT, Script, marked_generator, thinker
from tests.support.tools import TOOLS

pytest.importorskip("llguidance", reason="needs the extra `structured`")
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


@pytest.mark.parametrize("gamma", others_nightly([0, 4], usual=[4]))
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


@pytest.mark.parametrize("name", others_nightly(MARKED, usual=["think", "Mistral", "Command A", "GPT-OSS"]))
def test_a_thought_between_the_marks_of_a_template_is_no_content(name: str, tmp_path: Path) -> None:
    marked = MARKED[name]
    chat = marked_generator(marked, tmp_path)
    for text, reasoning in ((marked.thought, REASONING), (marked.plain, "")):
        for gamma in (0, 3) if reasoning else (3,):
            script: Any = [Script(chat.tokenizer, text)]
            result = chat.generate(messages=CHAT, max_tokens=128, gamma=gamma, logits_processor=script)
            assert (result.reasoning, result.content, result.text) == (reasoning, ANSWER, text)
        streamed = chat.stream(messages=CHAT, max_tokens=128, logits_processor=[Script(chat.tokenizer, text)])
        assert "".join(output.text for output in streamed) == text


@pytest.mark.parametrize("wanted", [{"response_format": FORMATS[0]}, {"tools": TOOLS, "tool_choice": "required"}])
def test_a_format_that_no_grammar_can_put_behind_a_thought_is_refused_by_name(
    wanted: dict[str, Any], tmp_path: Path
) -> None:
    channels = marked_generator(MARKED["GPT-OSS"], tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        channels.generate(messages=CHAT, max_tokens=8, **wanted)
    special = marked_generator(MARKED["Mistral"], tmp_path)
    special.tokenizer.chat_template = MARKED["Mistral"].template.replace("<|assistant|>", "<|assistant|>[THINK]")
    special = SpecStackGenerator(special.pair.target, special.pair.draft, special.tokenizer)
    message = r"special token '\[/THINK\]'; turn thinking off" if "tools" not in wanted else "tool_choice"
    with pytest.raises(ValueError, match=message):
        special.generate(messages=CHAT, max_tokens=8, **wanted)
