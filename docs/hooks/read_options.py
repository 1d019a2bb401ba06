"""Reads `spec_stack.config` as a user means it, where mkdocstrings reads it as it is written.

A configuration's field is `name: type = option(default, meaning)`: here it becomes a default and a line of a
"Parameters" section, as `settings.options.documented` makes it at run time. A default such as
`SamplingParams.max_tokens` becomes
256.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe


class ReadOptions(griffe.Extension):
    """Puts the defaults and meanings of configurations where a reader looks for them."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        rows = []
        for attribute in cls.members.values():
            call = attribute.value if isinstance(attribute, griffe.Attribute) else None
            if isinstance(call, griffe.ExprCall) and str(call.function) == "option":
                default, meaning, *_ = call.arguments
                attribute.value = default
                rows.append(f"{attribute.name} : {attribute.annotation}\n    {_text(str(meaning))}")
        if rows:
            text = cls.docstring.value if cls.docstring is not None else ""
            section = "\n".join(["Parameters", "----------", *rows])
            cls.docstring = griffe.Docstring(f"{text}\n\n{section}\n", parent=cls)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for function in _functions(pkg):
            for parameter in function.parameters:
                if isinstance(parameter.default, griffe.ExprAttribute):
                    parameter.default = _value(parameter.default, function)


def _text(source: str) -> str:
    """A string as written; what is only known at run time as the name of its constant."""
    parsed = ast.parse(source, mode="eval").body
    parts = parsed.values if isinstance(parsed, ast.JoinedStr) else [parsed]
    return "".join(
        str(part.value)
        if isinstance(part, ast.Constant)
        else "`" + next(node.id for node in ast.walk(part) if isinstance(node, ast.Name)) + "`"
        for part in parts
    )


def _functions(item: griffe.Module | griffe.Class) -> Iterator[griffe.Function]:
    for member in item.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _functions(member)


def _value(default: griffe.ExprAttribute, function: griffe.Function) -> Any:
    """What an attribute of a class of the package is; of anything else, the expression itself."""
    try:
        attribute = function.modules_collection[default.canonical_path]
    except (KeyError, griffe.AliasResolutionError):
        return default
    return attribute.value if isinstance(attribute, griffe.Attribute) else default
