"""A chat template that calls tools, for the embedded pair, and tools."""

from __future__ import annotations

from typing import Any

TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif
%}{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}{%
for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, all of whose arguments are wanted."""
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


TOOLS = [
    tool("look_up", place={"enum": ["Vienna", "Rome"]}),
    tool("add", a={"type": "integer", "maximum": 99, "minimum": 0}),
]
