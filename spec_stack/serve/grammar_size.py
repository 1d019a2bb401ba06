"""Sizes of response formats and tools, checked before they are compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

# Nesting of a format or tool (one rule per level), and of groups in a pattern.
_MAX_DEPTH, _MAX_GROUP_DEPTH = 34, 32
# Longest pattern or grammar in characters, and of any other string, per unit of size.
_CHARS_PER_SIZE, _PLAIN_CHARS_PER_SIZE = 4, 64
# A repetition with its counts, or one part: an escape, a character class or a character.
_PIECE = re.compile(r"\{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\}|\\.?|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Keywords of values, of which none is compiled as a schema, and keywords of schemas by name.
_VALUES = ("const", "default", "enum", "example", "examples")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def check_grammar_size(response_format: Any, tools: Sequence[Any] | None, most: int) -> None:
    """Raise ValueError if the format or a tool is larger, a pattern in it ends too early, or a $ref is to no schema."""
    for what, content in (("response_format", response_format), *(("a tool", tool) for tool in tools or ())):
        if schema_size(content, most) > most:
            raise ValueError(
                f"{what} is larger than this server compiles ({most} parts, each times the repetitions around it)"
            )


def pattern_size(pattern: str, most: int) -> int:
    """Parts of a pattern or grammar, times the repetitions around each; most + 1 if too long. `(ab){1,300}` has size
    600."""
    if len(pattern) > _CHARS_PER_SIZE * most:
        return most + 1
    # Sizes of the open groups and of the last part.
    sums, last = [0], 0
    for piece in _PIECE.finditer(pattern):
        if piece["least"] is not None:
            count = max(1, *(int(number[:9] or 1) for number in piece.groups("")))
            sums[-1] += last * (count - 1)
            last *= count
        elif piece[0] == "\\":
            raise ValueError(r"a pattern ends with \, which escapes the character after it")
        elif piece[0] == "(":
            sums.append(0)
        else:
            last = max(1, sums.pop()) if piece[0] == ")" and len(sums) > 1 else 1
            sums[-1] += last
        if max(sums) > most or len(sums) > _MAX_GROUP_DEPTH:
            return most + 1
    return sum(sums)


def schema_size(schema: Any, most: int, depth: int = 0) -> int:
    """Parts of a schema, or of a format or tool that holds some, times the counts around each; more than `most` if
    nested too deeply."""
    if depth > _MAX_DEPTH:
        return most + 1
    if isinstance(schema, list):
        return sum(schema_size(part, most, depth + 1) for part in schema)
    if isinstance(schema, str):
        return 1 + len(schema) // _PLAIN_CHARS_PER_SIZE
    if not isinstance(schema, Mapping):
        return 1
    size = 1 + sum(_entry_size(name, value, most, depth + 1) for name, value in schema.items())
    counts = [schema.get(name) for name in _COUNTS]
    # A count may be infinite or not a number.
    return size * max([1, *(int(min(it, most + 1)) for it in counts if isinstance(it, int | float) and it > 0)])


def _entry_size(name: str, value: Any, most: int, depth: int) -> int:
    if name in _VALUES:
        return _value_size(value, most, depth)
    if name in _OF_SCHEMAS and isinstance(value, Mapping):
        patterns = value if name == "patternProperties" else ()
        return sum(pattern_size(pattern, most) for pattern in patterns) + schema_size([*value.values()], most, depth)
    if name in ("pattern", "grammar") and isinstance(value, str):
        return pattern_size(value, most)
    if name == "$ref" and isinstance(value, str) and not _is_of_schema(value):
        raise ValueError(f"$ref must point at a schema, got {value[:100]!r}")
    return schema_size(value, most, depth)


def _value_size(value: Any, most: int, depth: int) -> int:
    """As `schema_size`, of a value without keywords."""
    if isinstance(value, Mapping):
        value = [None, *value.values()]
    if not isinstance(value, list) or depth > _MAX_DEPTH:
        return schema_size(value, most, depth)
    return sum(_value_size(part, most, depth + 1) for part in value)


def _is_of_schema(ref: str) -> bool:
    """Whether no part of a pointer lies in a value or is a map of schemas; those are not measured as schemas."""
    parts = iter(unquote(ref.partition("#")[2]).split("/")[1:])
    return not any(part in _VALUES or (part in _OF_SCHEMAS and next(parts, None) is None) for part in parts)
