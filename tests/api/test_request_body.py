"""What the draft reads of a request's body, and where the shorter texts go."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from spec_stack.api.request_body import find_prompt

USER = {"role": "user", "content": "Look."}
CALL = {"type": "function", "function": {"name": "shell", "arguments": '{"x": 1}'}}


def read(messages: Any, **body: Any) -> list[dict[str, Any]]:
    chat = find_prompt({"messages": messages, **body}).chat
    assert isinstance(chat, list)
    return chat


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Look.", "name": "alice"},
        {"role": "user", "content": "Look.", "id": "m1", "timestamp": 7},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "Look."}]},
        {"role": "user", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": None, "refusal": None},
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}], "type": "message", "status": "x"},
        {"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Look."}]},
    ],
)
def test_fields_that_the_draft_does_not_read_make_no_other_prompt(other: dict[str, Any]) -> None:
    assert read([other]) == read([USER])


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "id": "call_1", "index": 0},
        {"type": "custom", "custom": {"name": "shell", "input": '{"x": 1}'}, "id": "call_2"},
        {"function": {"name": "shell", "arguments": {"x": 1}}},
    ],
)
def test_calls_of_every_form_are_read(call: dict[str, Any]) -> None:
    assert read([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])[1]["tool_calls"] == [CALL]


@pytest.mark.parametrize("calls", [[], None, "x", [None], [{}], [{"type": "mystery"}], [{"function": "f"}], 7])
def test_calls_that_nobody_knows_are_passed_over(calls: Any) -> None:
    expected = [{"role": "assistant", "content": ""}]
    assert read([USER, {"role": "assistant", "content": None, "tool_calls": calls}])[1:] == expected


@pytest.mark.parametrize("content", ["Done.", [{"type": "text", "text": "Done."}]])
def test_anthropics_tool_results_are_messages_of_the_role_tool(content: Any) -> None:
    anthropic = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "shell", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]},
    ]
    openai = [
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "Done."},
    ]
    for system in ("Be short.", [{"type": "text", "text": "Be short.", "cache_control": {}}]):
        assert read(anthropic, system=system) == read(openai)
    anthropic[2]["content"].append({"type": "text", "text": "And now?"})
    assert read(anthropic)[2:] == [{"role": "tool", "content": "Done."}, {"role": "user", "content": "And now?"}]


def test_items_of_responses_are_the_chat_that_they_stand_for() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "call_id": "a", "name": "shell", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "Done."},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Too."}]},
    ]
    prompt = find_prompt({"model": "m", "instructions": "Be short.", "input": items})
    assert prompt.chat == read(
        [
            {"role": "system", "content": "Be short."},
            USER,
            {"role": "assistant", "content": "I call.", "tool_calls": [CALL]},
            {"role": "tool", "content": "Done."},
            {"role": "tool", "content": "Too."},
        ]
    )
    shorter = prompt.shortened([{**message, "content": "s"} for message in prompt.chat])
    assert shorter["instructions"] == "Be short."
    assert [item.get("output") for item in shorter["input"][4:]] == ["s", [{"type": "input_text", "text": "s"}]]
    assert find_prompt({"input": "Look."}).chat == [USER]
    assert find_prompt({"input": "Look."}).shortened([{"role": "user", "content": "L"}]) == {"input": "L"}


def test_shorter_texts_go_where_they_stood_and_the_body_stays() -> None:
    result = {"type": "tool_result", "content": [{"type": "image"}, {"type": "text", "text": "one", "x": 1}]}
    parts = [result, {"type": "image"}, {"type": "text", "text": "two"}, {"type": "tool_result", "content": "three"}]
    body: dict[str, Any] = {"messages": [USER, {"role": "user", "content": parts}], "stream": True}
    before = copy.deepcopy(body)
    prompt = find_prompt(body)

    def shortened(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": content.upper()}
        return {**message, "content": [{**part, "text": part["text"].upper()} for part in content]}

    expected = json.dumps(body)
    for text in ("Look.", "one", "two", "three"):
        expected = expected.replace(f'"{text}"', f'"{text.upper()}"')
    assert json.dumps(prompt.shortened([*map(shortened, prompt.chat)])) == expected  # type: ignore[arg-type]
    assert body == before


@pytest.mark.parametrize("prompt", ["text", ["text"]])
def test_a_text_or_a_batch_of_one_is_a_text(prompt: Any) -> None:
    found = find_prompt({"prompt": prompt, "n": 2})
    assert found.chat == "text"
    assert found.shortened("t") == {"prompt": "t" if prompt == "text" else ["t"], "n": 2}


@pytest.mark.parametrize("stored", [{"id": "pmpt_1"}, None])
def test_a_stored_prompt_beside_the_input_is_none(stored: Any) -> None:
    found = find_prompt({"prompt": stored, "input": "Look."})
    assert found.chat == [USER]
    assert found.shortened([{"role": "user", "content": "L"}]) == {"prompt": stored, "input": "L"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": {"id": "pmpt_1"}},
        {"messages": []},
        {"messages": "x"},
        {"messages": [5]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user"}]},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"prompt": None},
        {"input": ["a", "b"]},
        {"input": [{"type": "reasoning"}]},
        {"system": "x", "messages": None},
    ],
)
def test_a_body_without_a_text_to_prune_says_so(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="holds no text to prune"):
        find_prompt(body)
