"""Bounds on what a body may hold, checked before any work is done for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Nesting of a body; of a schema, which compiles into a rule for each level; of groups in a pattern.
MAX_DEPTH, MAX_SCHEMA_DEPTH, MAX_GROUP_DEPTH = 64, 32, 32
# Longest list of stop strings or ids, and longest stop string: each is looked for at every step.
MAX_STOPS, MAX_STOP_CHARS = 64, 1000
# Longest pattern or grammar in characters, per unit of `max_size`.
_CHARS_PER_SIZE = 4
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


@dataclass(frozen=True)
class Bounds:
    """How much a body may hold.

    Parameters
    ----------
    max_chars : int
        Characters of all its texts and names together; every other value counts as one.
    max_size : int
        Size of a pattern, schema or grammar: its parts, each times the repetitions around it.
    """

    max_chars: int
    max_size: int

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise ValueError where a body holds more.

        Parameters
        ----------
        body : mapping
            As JSON was parsed.
        """
        self._check_chars(body)
        for name in ("stop", "stop_token_ids"):
            stops = body.get(name)
            stops = stops if isinstance(stops, list) else [stops]
            if len(stops) > MAX_STOPS:
                raise ValueError(f"{name} has {len(stops)} entries; this server takes {MAX_STOPS}")
            if any(isinstance(it, str) and len(it) > MAX_STOP_CHARS for it in stops):
                raise ValueError(f"a stop string is over {MAX_STOP_CHARS} characters")
        wanted = body.get("response_format")
        if isinstance(wanted, Mapping):
            self._check_format(wanted)
        for tool in body.get("tools") or ():
            if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
                self._check_size(_schema_size(tool["function"].get("parameters"), self.max_size), "a tool's parameters")

    def _check_chars(self, body: Mapping[str, Any]) -> None:
        num_chars, level = 0, [body]
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
            if num_chars + len(deeper) > self.max_chars:
                raise ValueError(f"the request is longer than this server takes, {self.max_chars} characters")
            if not deeper:
                return
            level = deeper
        raise ValueError(f"the request is nested deeper than this server takes, {MAX_DEPTH} levels")

    def _check_format(self, wanted: Mapping[str, Any]) -> None:
        for name in ("pattern", "grammar"):
            text = wanted.get(name)
            if isinstance(text, str):
                self._check_size(_pattern_size(text, self.max_size), f"response_format: the {name}")
        inner = wanted.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else wanted.get("schema")
        self._check_size(_schema_size(schema, self.max_size), "response_format: the schema")

    def _check_size(self, size: int, what: str) -> None:
        if size > self.max_size:
            raise ValueError(
                f"{what} is larger than this server compiles ({self.max_size} parts, each times the repetitions "
                "around it)"
            )


def _pattern_size(pattern: str, most: int) -> int:
    """Return the size of a regular expression, or of a grammar, whose repetitions are written alike.

    Parts count one each, a group as much as its parts, and what is repeated times its largest count: `(ab){1,300}` has
    the size 600. One that is too long or too deep to be counted has `most` + 1.
    """
    if len(pattern) > _CHARS_PER_SIZE * most:
        return most + 1
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
    """Where the escape, character class or single character at a place ends."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    found = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL).match(pattern, at)
    return found.end() if found else at + 1


def _schema_size(schema: Any, most: int, depth: int = 0) -> int:
    """Return the size of a JSON schema: its parts, and each of them times how often it may or must come."""
    if depth > MAX_SCHEMA_DEPTH:
        return most + 1
    if isinstance(schema, list):
        return _sum((_schema_size(part, most, depth + 1) for part in schema), most)
    if not isinstance(schema, Mapping):
        return 1
    size = 1 + _sum((_entry_size(name, value, most, depth) for name, value in schema.items()), most)
    counts = [schema.get(name) for name in _COUNTS]
    # No more than is needed to be too much: a count may be infinite, or none at all.
    return size * max(
        [1, *(int(min(count, most + 1)) for count in counts if isinstance(count, int | float) and count > 0)]
    )


def _entry_size(name: str, value: Any, most: int, depth: int) -> int:
    if name == "pattern" and isinstance(value, str):
        return _pattern_size(value, most)
    if name == "patternProperties" and isinstance(value, Mapping):
        return _sum((_pattern_size(pattern, most) for pattern in value), most) + _schema_size(
            list(value.values()), most, depth + 1
        )
    return _schema_size(value, most, depth + 1)


def _sum(sizes: Iterable[int], most: int) -> int:
    """Add sizes up, no further than is needed to know that they are too much."""
    total = 0
    for size in sizes:
        total += size
        if total > most:
            break
    return total
