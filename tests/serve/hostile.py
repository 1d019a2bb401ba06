"""A hundred bodies, each of which would stop or fill a server that did what it asks."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": HELLO, "max_tokens": 4} | fields).encode()


def text(**fields: Any) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": "Hello", "max_tokens": 4} | fields).encode()


def template(source: str) -> tuple[str, bytes]:
    return chat(chat_template_kwargs={"chat_template": source})


def pattern(regex: str) -> tuple[str, bytes]:
    return chat(response_format={"type": "regex", "pattern": regex})


def schema(content: Any) -> tuple[str, bytes]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": content}})


def nested(depth: int, inner: Any, name: str | None = None) -> Any:
    for _ in range(depth):
        inner = [inner] if name is None else {name: inner}
    return inner


def ebnf(source: str) -> tuple[str, bytes]:
    return chat(response_format={"type": "grammar", "grammar": source})


def tool(parameters: Any, **fields: Any) -> tuple[str, bytes]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return chat(tools=tools, tool_choice="required", **fields)


LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
TEMPLATES = [
    template(LOOP),
    template("{{ ('a' * 1000000000)[:10] }}"),
    template("{{ range(100000) | list | string }}" * 50),
    template("{% set x = namespace(a='a') %}{% for _ in range(60) %}{% set x.a = x.a ~ x.a %}{% endfor %}{{ x.a }}"),
    template("{{ 10 ** 10 ** 10 }}"),
    template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    template("{{ ''.__class__.__mro__ }}"),
    template("{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    template("{{ 'x'.ljust(2000000000) }}"),
    template("{{ lipsum(n=100000) }}"),
    template("{" * 50000),
    template(""),
]
SWITCHES = [
    chat(chat_template_kwargs={name: value})
    for name, value in (
        ("tokenize", True),
        ("padding", "max_length"),
        ("truncation", True),
        ("max_length", 10**9),
        ("return_tensors", "pt"),
        ("return_dict", True),
        ("tokenizer_kwargs", {"padding": "max_length", "max_length": 10**9}),
        ("return_assistant_tokens_mask", True),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("conversation", []),
        ("tools", []),
        ("documents", []),
    )
]
PATTERNS = [
    pattern("((a{1,300}){1,300}){1,300}"),
    pattern("(((a{1,9}){1,9}){1,9}){1,9}"),
    pattern("a{1,100000000}"),
    pattern("a{99999999999999999999}"),
    pattern("[^a]{1,10000}"),
    pattern("(" * 5000 + "a" + ")" * 5000),
    pattern("(a|b){500}" * 500),
    pattern("a" * 200000),
    pattern("(x{0,2000}y{0,2000}){3}"),
    pattern("[" * 3000),
    pattern("(?:(?:[a-z]{1,100}-){1,100})"),
    pattern("(" * 3),
    pattern("\\"),
    pattern(""),
]
WIDE = {f"p{index}": {"type": "string"} for index in range(5000)}
SCHEMAS = [
    schema(nested(200, {"type": "string"}, "items")),
    schema(nested(500, {}, "anyOf")),
    schema({"type": "string", "maxLength": 10**9}),
    schema({"type": "string", "minLength": 20000}),
    schema({"type": "array", "minItems": 10**12, "items": {"type": "integer"}}),
    schema({"type": "array", "maxItems": 300, "items": {"type": "array", "maxItems": 300, "items": {"enum": [1]}}}),
    schema({"type": "string", "pattern": "((a{1,300}){1,300}){1,300}"}),
    schema({"type": "object", "patternProperties": {"^(a{1,300}){1,300}$": {"type": "string"}}}),
    schema({"type": "object", "properties": WIDE}),
    schema({"enum": list(range(50000))}),
    schema({"allOf": [{"type": "object", "properties": WIDE}] * 3}),
    schema({"$ref": "#/$defs/none"}),
    schema({"type": "array", "items": {"type": "string", "maxLength": 3000}, "maxItems": 3000}),
    schema({"type": "nonsense"}),
    schema([]),
    schema("{}"),
    schema({"type": "object", "maxProperties": 10**9, "additionalProperties": {"type": "string"}}),
]
GRAMMARS = [
    ebnf('root ::= "a"{1,1000000}'),
    ebnf('root ::= (("a"{1,300}){1,300}){1,300}'),
    ebnf("root ::= " + "(" * 5000),
    ebnf("root ::= root"),
    ebnf("root ::= x" * 20000),
    ebnf("nothing"),
    ebnf(""),
    chat(response_format={"type": "structural_tag"}),
    chat(response_format={}),
]
TOOLS = [
    tool({"type": "string", "maxLength": 10**9}),
    tool(nested(300, {}, "items")),
    tool({"type": "object", "properties": WIDE}),
    chat(tools=[], tool_choice="required"),
    chat(tool_choice={"type": "function", "function": {"name": "g"}}),
    chat(tool_choice=nested(100, {}, "a")),
    chat(tools="f"),
    chat(tools=[{"type": "function", "function": {"name": "f" * 400000}}]),
]


def _lengths() -> list[tuple[str, bytes]]:
    return [
        chat(messages=[{"role": "user", "content": "x" * 400000}]),
        chat(messages=[{"role": "user", "content": "a" * 7_000_000}]),
        chat(messages=[{"role": "user", "content": "é" * 9_000_000}]),
        chat(messages=[{"role": "user", "content": "hi"}] * 60000),
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}] * 60000}]),
        chat(messages=[{"role": "r" * 400000, "content": ""}]),
        chat(**{"k" * 400000: 1}),
        chat(metadata={str(index): index for index in range(60000)}),
        text(prompt="word " * 90000),
        text(prompt=[1] * 500000),
        text(prompt=["a"] * 90000),
        text(prompt=[2**70]),
    ]


NESTS = [
    (CHAT, b"[" * 500000),
    (CHAT, b'{"a":' * 100000),
    (CHAT, b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
    chat(messages=[{"role": "user", "content": nested(200, "x")}]),
    chat(metadata=nested(900, 1, "a")),
    chat(documents=[nested(200, "x", "a")]),
    (CHAT, b"\xff\xfe{}"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud8zz"}]}'),
]
VALUES = [
    chat(stop=["x" * 100] * 10000),
    chat(stop=["x" * 100000]),
    chat(stop_token_ids=list(range(16000))),
    chat(n=10**9),
    chat(max_tokens=10**30),
    chat(top_logprobs=10**6, logprobs=True),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
]


# The grammar compiler bounds its own work, so some of these are answered.
FORMATS = [*PATTERNS, *SCHEMAS, *GRAMMARS, *TOOLS]


@cache
def hostile() -> list[tuple[str, bytes]]:
    """All of them; of 100 MB, so that they are made where they are sent."""
    bodies = [*TEMPLATES, *SWITCHES, *FORMATS, *_lengths(), *NESTS, *VALUES]
    assert len(bodies) == 100
    return bodies
