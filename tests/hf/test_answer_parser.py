"""Calls and thoughts in an answer, in the formats of several templates, however its text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spec_stack.hf.answer_parser import AnswerFormat, AnswerParser, ThoughtMarks, ToolFormat, forced_names, parse_answer
from spec_stack.types import AnswerPart

HERMES = """{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' ~ m.content }}{% for c in m.tool_calls or [] %}
{{ '\\n' if not loop.first or m.content }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""
LLAMA = """{% for m in messages %}<|start|>{{ m.role }}<|stop|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}{%
if add_generation_prompt %}<|start|>assistant<|stop|>

{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls
%}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{
c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else
%}{{ m.content }}</s>{% endif %}{% endfor %}"""
CALLS = """{% for m in messages %}<|start|>{{ m.role }}<|stop|>{% if m.content is string %}{{ m.content }}{% endif %}{%
if m.tool_calls %}BODY{% endif %}<|eot|>{% endfor %}{%
if add_generation_prompt %}<|start|>assistant<|stop|>{% endif %}"""
EACH = "{% for c in m.tool_calls %}{{ CALL }}{% endfor %}"
ARGUMENTS = "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)"
BODIES = {
    "nemotron": "<TOOLCALL>["
    + EACH.replace("CALL", '\'{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ ' + ARGUMENTS + " ~ '}'")
    + "]</TOOLCALL>",
    "dumped bare": "{{ m.tool_calls | tojson }}",
    "brackets": EACH.replace("{{ CALL }}", "[TOOL_REQUEST]\n{{ c.function | tojson }}\n[END_TOOL_REQUEST]"),
    "text": EACH.replace(
        "CALL", "'<call>{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}</call>'"
    ),
    "command": 'Action: ```json\n[{% for c in m.tool_calls %}{"tool_name": "{{ c.function.name }}", "parameters": {{'
    "c.function.arguments | tojson }}}{% endfor %}]```",
}
PARTS = """{% for m in messages %}<|start|>{{ m.role }}<|stop|>{% for p in m.content %}{{ p.text }}{% endfor %}{%
for c in m.tool_calls or [] %}<tool>{{ c.function | tojson }}</tool>{% endfor %}<|eot|>{% endfor %}{%
if add_generation_prompt %}<|start|>assistant<|stop|>{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "[INST]", "[/INST]"]
SPECIAL += ["[TOOL_CALLS]", "</s>"]


class Templated:
    """A tokenizer as far as formats are learnt from one: its template and its special tokens."""

    def __init__(self, template: str, eos_token: str) -> None:
        self.chat_template, self.eos_token = template, eos_token
        self.added_tokens_decoder = {
            at: SimpleNamespace(content=token, special=True) for at, token in enumerate(SPECIAL)
        }

    def get_chat_template(self, tools: Sequence[Any] | None = None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> str:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(self.chat_template).render(messages=messages, **options)


FORMATS = {
    "hermes": AnswerFormat.learn(Templated(HERMES, "<|im_end|>")),
    "llama": AnswerFormat.learn(Templated(LLAMA, "<|eot|>")),
    "mistral": AnswerFormat.learn(Templated(MISTRAL, "</s>")),
    "parts": AnswerFormat.learn(Templated(PARTS, "<|eot|>")),
    **{name: AnswerFormat.learn(Templated(CALLS.replace("BODY", body), "<|eot|>")) for name, body in BODIES.items()},
}
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"q": "a<b>"}}\n</tool_call>',
    "llama": '{"name": "f", "parameters": {"q": "a<b>"}}',
    "mistral": '[{"name": "f", "arguments": {"q": "a<b>"}}]',
}


def parts_of(parser: AnswerParser, text: str, cuts: Sequence[int]) -> list[AnswerPart]:
    """The parts of a text that comes in pieces."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [part for start, stop in pairwise(edges) for part in parser.push(text[start:stop])] + parser.flush()


def parsed(name: str, text: str, cuts: Sequence[int] = (), **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls."""
    parts = parts_of(AnswerParser(FORMATS[name], **({"names": ["f", "g"]} | options)), text, cuts)
    content = "".join(part.text for part in parts if part.kind == "content")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    return content, reasoning, [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]


def test_formats_are_learnt_from_templates() -> None:
    assert FORMATS["hermes"].tools == ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    assert FORMATS["llama"].tools == ToolFormat('{"name": "', '", "parameters": ', "}")
    assert FORMATS["mistral"].tools == ToolFormat('[{"name": "', '", "arguments": ', "}]")
    assert AnswerFormat.learn(Templated("{{ messages[0].content }}", "</s>")) == AnswerFormat()
    assert AnswerFormat.learn(Templated("{{ raise_exception('no') }}</think>", "</s>")) == AnswerFormat(thinks=True)
    assert AnswerFormat.learn(None) == AnswerFormat()


@pytest.mark.parametrize("name", sorted(ANSWERS))
@given(cuts=st.lists(st.integers(1, 80)))
def test_a_call_is_found_however_its_text_is_cut(name: str, cuts: list[int]) -> None:
    assert parsed(name, ANSWERS[name], cuts) == ("", "", [("f", {"q": "a<b>"})])


@given(cuts=st.lists(st.integers(1, 300)))
def test_text_thoughts_and_several_calls_stand_apart(cuts: list[int]) -> None:
    text = f"Let me look.\n{ANSWERS['hermes']}\n" + ANSWERS["hermes"].replace('"f"', '"other"')
    wanted = [("f", {"q": "a<b>"}), ("other", {"q": "a<b>"})]
    assert parsed("hermes", text, cuts) == ("Let me look.", "", wanted)
    FORMATS["thinker"] = AnswerFormat(FORMATS["hermes"].tools, thinks=True)
    assert parsed("thinker", f"<think>\nHm, < and\n</think>\n\n{text}", cuts) == ("Let me look.", "Hm, < and", wanted)
    assert parsed("thinker", f"\nHm.\n</think>\n\n{text}", cuts, in_thought=True) == ("Let me look.", "Hm.", wanted)
    assert parsed("thinker", "<think>\nwithout an end", cuts)[:2] == ("", "without an end")


@given(cuts=st.lists(st.integers(1, 300)))
def test_thoughts_in_channels_stand_apart(cuts: list[int]) -> None:
    opens, closes, final = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
    FORMATS["channels"] = AnswerFormat(None, True, ThoughtMarks(opens, closes, (final,)))
    thought = f"{opens}So <|end|> it{closes}"
    assert parsed("channels", f"{thought}{final}Yes <|end|>", cuts) == ("Yes <|end|>", "So <|end|> it", [])
    assert parsed("channels", f"{thought}{thought}{final}Yes", cuts) == ("Yes", "So <|end|> itSo <|end|> it", [])
    assert parsed("channels", f"{final}Yes", cuts) == ("Yes", "", [])
    call = "<|channel|>commentary to=functions.f<|message|>{}"
    assert parsed("channels", f"{thought}{call}", cuts) == (call, "So <|end|> it", [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call> and on",
        'So:\n\n<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call",
        "a < b <tool",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "f", "arguments": {}} is what I would call',
        '{"names": 1}',
        "```json\n[1, 2]\n```",
        "  \n blanks \n ",
        "",
    ],
)
@given(cuts=st.lists(st.integers(1, 60)))
def test_what_cannot_be_parsed_stays_text(text: str, cuts: list[int]) -> None:
    for name in ("hermes", "llama", "mistral"):
        assert parsed(name, text, cuts) == (text, "", [])


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"q": "MARK"}',
        '{"q": "}]MARKOPEN{\\"name\\": \\"g\\"}MARK", "r": ["\\\\", "\\"MARK"]}',
        '{"q": "\\ud83d", "r": "\\ude00 \\ud83d\\ude00"}',
        '{"q": 1e999, "r": -1E+400, "s": 0.10000000000000000000001}',
        '{"q": ' + "9" * 5000 + "}",
        '{"q": "```json", "arguments": {"name": "g"}}',
        '{ "q":\n1 }',
    ],
)
@pytest.mark.parametrize("name", sorted({*FORMATS} - {"thinker", "channels"}))
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 200), max_size=8))
def test_arguments_come_as_they_were_written_in_every_format(name: str, arguments: str, cuts: list[int]) -> None:
    tools = FORMATS[name].tools
    assert tools is not None
    arguments = arguments.replace("MARK", tools.closer).replace("OPEN", tools.opener)
    text = f"{tools.begin}f{tools.middle}{arguments}{tools.end}"
    text = f"So:\n{text}\n{text} Or?" if tools.closer else text
    parts = parts_of(AnswerParser(FORMATS[name], ["f"]), text, cuts)
    assert [part.call.arguments for part in parts if part.call] == [arguments] * (2 if tools.closer else 1)
    assert "".join(part.text for part in parts) == ("So:Or?" if tools.closer else "")


@pytest.mark.parametrize(
    "arguments", ['{"q": NaN}', '{"q": Infinity}', '{"q": -Infinity}', "[1]", '"no"', "null", '{"a": ' + "[" * 5000]
)
def test_what_is_no_json_object_is_no_call(arguments: str) -> None:
    for name in ("hermes", "nemotron", "llama"):
        tools = FORMATS[name].tools
        assert tools is not None
        text = f"{tools.begin}f{tools.middle}{arguments}{tools.end}"
        assert parsed(name, text) == (text, "", [])
    text = '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>'
    assert parsed("hermes", text) == (text, "", [])


@given(cuts=st.lists(st.integers(1, 300)))
def test_a_broken_call_hides_no_call_behind_it(cuts: list[int]) -> None:
    broken = '<tool_call>\n{"name": "f, "arguments": {}}\n</tool_call>'
    content, _, calls = parsed("hermes", f"{broken}\n{ANSWERS['hermes']}", cuts)
    assert (content, calls) == (broken, [("f", {"q": "a<b>"})])


def test_calls_written_as_one_list_are_all_found() -> None:
    inner = ", ".join(f'{{"name": "{name}", "arguments": {{"at": {at}}}}}' for at, name in enumerate("fg"))
    assert parsed("nemotron", f"<TOOLCALL>[{inner}]</TOOLCALL>")[2] == [("f", {"at": 0}), ("g", {"at": 1})]
    assert parsed("nemotron", "<TOOLCALL>[]</TOOLCALL>") == ("<TOOLCALL>[]</TOOLCALL>", "", [])


def test_calls_are_text_where_no_tools_were_given() -> None:
    for name, text in ANSWERS.items():
        assert parsed(name, text, names=[]) == (text, "", [])


def test_a_call_without_its_mark_or_in_a_fence_is_found_where_it_is_the_whole_answer() -> None:
    bare = ANSWERS["llama"]
    for text in (bare, f"```json\n{bare}\n```", f"\n{bare}\n", ANSWERS["mistral"]):
        assert parsed("hermes", text)[2] == [("f", {"q": "a<b>"})]
    assert [name for name, _ in parsed("llama", f"{bare}; {bare}")[2]] == ["f", "f"]
    assert parsed("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}')[2] == [("f", {"a": 1})]


def test_calls_have_ids_that_every_template_takes() -> None:
    _, _, calls = parse_answer(AnswerParser(FORMATS["hermes"], ["f"]), ANSWERS["hermes"] * 2)
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_what_must_be_called_is_told_from_openais_choices() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    assert forced_names("auto", tools) is forced_names("none", tools) is forced_names(None, None) is None
    assert forced_names("required", tools) == ["f", "g"]
    assert forced_names({"type": "function", "function": {"name": "g"}}, tools) == ["g"]
    for choice, given_tools in (("required", None), ("maybe", tools), ({"type": "function"}, tools)):
        with pytest.raises(ValueError, match="tool_choice"):
            forced_names(choice, given_tools)
