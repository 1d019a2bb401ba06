"""Limits on a request's contents, checked before any work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Nesting of a body, of a schema (one rule per level), and of groups in a pattern.
MAX_DEPTH, MAX_SCHEMA_DEPTH, MAX_GROUP_DEPTH = 64, 32, 32
# Most stop strings or ids, and characters of one: each is searched for at every step.
MAX_STOPS, MAX_STOP_CHARS = 64, 1000
# Longest pattern or grammar in characters, per unit of `max_size`.
_CHARS_PER_SIZE = 4
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_PART = re.compile(r"\\.?|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check_limits(request: Mapping[str, Any], max_chars: int, max_size: int) -> None:
    """Raise ValueError if a parsed request exceeds a limit.

    max_chars: of all texts and names. max_size: of the largest pattern, schema or grammar.
    """
    _check_chars(request, max_chars)
    for name in ("stop", "stop_token_ids"):
        _check_stops(name, request.get(name))
    for what, size in _grammar_sizes(request, max_size):
        if size > max_size:
            raise ValueError(
                f"{what} is larger than this server compiles ({max_size} parts, each times the repetitions around it)"
            )


def _check_chars(request: Mapping[str, Any], max_chars: int) -> None:
    """Count characters level by level; other values count as one."""
    num_chars, level = 0, [request]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                num_chars += len(value)
            elif isinstance(value, dict):
                num_chars += sum(map(len, value))
                deeper.extend(value.values())
            elif isinstance(value, list):
                deeper.extend(value)
            else:
                num_chars += 1
        if num_chars + len(deeper) > max_chars:
            raise ValueError(f"the request is longer than this server takes, {max_chars} characters")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"the request is nested deeper than this server takes, {MAX_DEPTH} levels")


def _grammar_sizes(request: Mapping[str, Any], max_size: int) -> Iterator[tuple[str, int]]:
    wanted = request.get("response_format")
    if isinstance(wanted, Mapping):
        for name in ("pattern", "grammar"):
            if isinstance(wanted.get(name), str):
                yield f"response_format: the {name}", pattern_size(wanted[name], max_size)
        inner = wanted.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else wanted.get("schema")
        yield "response_format: the schema", schema_size(schema, max_size)
    for tool in request.get("tools") or ():
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            yield "a tool's parameters", schema_size(tool["function"].get("parameters"), max_size)


def _check_stops(name: str, stops: Any) -> None:
    stops = stops if isinstance(stops, list) else [stops]
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{name} has {len(stops)} entries; this server takes {MAX_STOPS}")
    if any(isinstance(stop, str) and len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string is over {MAX_STOP_CHARS} characters")


def pattern_size(pattern: str, most: int) -> int:
    """Parts of a pattern or grammar, times the repetitions around each; most + 1 if too long. `(ab){1,300}` has size
    600."""
    if len(pattern) > _CHARS_PER_SIZE * most:
        return most + 1
    # Sizes of the open groups and of the last part.
    sums, last, at = [0], 0, 0
    while at < len(pattern):
        char = pattern[at]
        repeat = _REPEAT.match(pattern, at) if char == "{" else None
        if repeat is not None:
            count = max(int(number[:9]) for number in (*repeat.groups(""), "1") if number)
            sums[-1] += last * (count - 1)
            at, last = repeat.end(), last * count
        elif char == "(":
            sums.append(0)
            at += 1
        elif char == ")" and len(sums) > 1:
            last = max(1, sums.pop())
            sums[-1] += last
            at += 1
        else:
            at, last = _part_end(pattern, at), 1
            sums[-1] += 1
        if max(sums) > most or len(sums) > MAX_GROUP_DEPTH:
            return most + 1
    return sum(sums)


def _part_end(pattern: str, at: int) -> int:
    """The end of the escape, character class or character at an index."""
    part = _PART.match(pattern, at)
    return part.end() if part else at + 1


def schema_size(schema: Any, most: int, depth: int = 0) -> int:
    """Parts of a JSON schema, times the counts around each; more than `most` if nested too deeply."""
    if depth > MAX_SCHEMA_DEPTH:
        return most + 1
    if isinstance(schema, list):
        return sum(schema_size(part, most, depth + 1) for part in schema)
    if not isinstance(schema, Mapping):
        return 1
    size = 1 + sum(_entry_size(name, value, most, depth + 1) for name, value in schema.items())
    counts = [schema.get(name) for name in _COUNTS]
    # A count may be infinite or not a number.
    return size * max([1, *(int(min(it, most + 1)) for it in counts if isinstance(it, int | float) and it > 0)])


def _entry_size(name: str, value: Any, most: int, depth: int) -> int:
    if name == "pattern" and isinstance(value, str):
        return pattern_size(value, most)
    if name == "patternProperties" and isinstance(value, Mapping):
        return sum(pattern_size(pattern, most) for pattern in value) + schema_size([*value.values()], most, depth)
    return schema_size(value, most, depth)
