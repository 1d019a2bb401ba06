"""Incremental parser of answers: reasoning, text and tool calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NoReturn

from spec_stack.hf.answer_format import ARGUMENTS_KEYS, NAME_KEYS, AnswerFormat
from spec_stack.types import AnswerPart, ToolCall

# Markers that small models write around a call in place of the template's.
_FENCE = re.compile(r"```(?:json)?\s*")
_STARTS = ('{"name":"', '[{"name":"', '{"type":"function"')
_BETWEEN = re.compile(r"[\s,;]*")
# A possibly unfinished JSON string.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"?'
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

Take = Callable[[bool], list[AnswerPart]]


class AnswerParser:
    """Splits a streamed answer into reasoning, text and complete calls of these tools; text that does not parse stays
    text. in_thought: the prompt ends inside a reasoning block."""

    def __init__(self, answer_format: AnswerFormat, names: Collection[str] = (), in_thought: bool = False) -> None:
        tools = answer_format.tools if names else None
        self._names = frozenset(names)
        self._opener, self._closer = (tools.opener, tools.closer) if tools else ("", "")
        self._starts = (*_STARTS, _compact(tools.begin.removeprefix(self._opener))) if tools else ()
        self._thinks, self._thought = answer_format.thinks, answer_format.thought
        self._take: Take = self._take_thought if in_thought else self._take_start
        self._buffer = ""
        # Template whitespace, dropped before the next part.
        self._blanks = "\n" if in_thought else ""
        # Whitespace before a possible call marker.
        self._gap = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Add generated text and return the parts that are final."""
        self._buffer += text
        return self._run(is_end=False)

    def flush(self) -> list[AnswerPart]:
        """The buffered rest at the end of the answer."""
        return self._run(is_end=True)

    def _run(self, is_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            self._buffer = self._buffer.lstrip(self._blanks) if self._blanks else self._buffer
            if self._blanks and not self._buffer and not is_end:
                return _merged(parts)
            before, self._blanks = self._take, ""
            parts += self._take(is_end)
            if self._take == before:
                return _merged(parts)

    def _go_on(self, rest: str, take: Take, blanks: str = "") -> None:
        self._buffer, self._take, self._blanks = rest, take, blanks

    def _take_start(self, is_end: bool) -> list[AnswerPart]:
        """The start of the answer after whitespace: reasoning, a header, a call without a marker, or text."""
        start, marks = self._buffer.lstrip(), self._thought
        if self._thinks and start.startswith(marks.opens):
            self._go_on(start[len(marks.opens) :], self._take_thought, "\n")
            return []
        if header := next((each for each in marks.headers if start.startswith(each)), ""):
            self._go_on(start[len(header) :], self._take_text)
            return []
        may_think = self._thinks and any(mark.startswith(start) for mark in (marks.opens, *marks.headers))
        may_call = any(begin.startswith(_compact(start)) for begin in self._starts)
        if is_end or not (may_think or may_call):
            calls = any(_compact(start).startswith(begin) for begin in self._starts)
            self._take = self._take_bare if calls else self._take_text
        return []

    def _take_thought(self, is_end: bool) -> list[AnswerPart]:
        thought, found, rest = self._buffer.partition(self._thought.closes)
        if not found:
            return self._hold("reasoning", self._thought.closes, is_end)
        # Where each part has a header, a second thought may follow.
        self._thinks = bool(self._thought.headers)
        self._go_on(rest, self._take_start, "\n")
        return [AnswerPart("reasoning", thought.rstrip())] if thought.strip() else []

    def _take_bare(self, is_end: bool) -> list[AnswerPart]:
        """An answer that starts as JSON: calls if all of it is calls, else text."""
        if not is_end:
            return []
        calls = _read_calls(self._buffer)
        if any(call.name not in self._names for call in calls) or not calls:
            self._take = self._take_text
            return []
        self._buffer = ""
        return [AnswerPart("call", call=call) for call in calls]

    def _take_text(self, is_end: bool) -> list[AnswerPart]:
        if not self._opener:
            text, self._buffer = self._buffer, ""
            return [AnswerPart("content", text)] if text else []
        text, found, rest = self._buffer.partition(self._opener)
        if not found:
            return self._hold("content", self._opener, is_end)
        said = text.rstrip()
        self._gap = text[len(said) :]
        self._go_on(rest, self._take_call)
        return [AnswerPart("content", said)] if said else []

    def _take_call(self, is_end: bool) -> list[AnswerPart]:
        """The JSON between two markers; a marker inside a JSON string does not count."""
        end = self._end_of_call()
        if end < 0 and not is_end:
            return []
        inner, rest = (self._buffer[:end], self._buffer[end:]) if end >= 0 else (self._buffer, "")
        if calls := _read_calls(inner):
            self._go_on(rest.removeprefix(self._closer), self._take_text, string.whitespace)
            return [AnswerPart("call", call=call) for call in calls]
        inner, found, rest = self._buffer.partition(self._closer) if self._closer else (self._buffer, "", "")
        self._go_on(rest, self._take_text)
        return [AnswerPart("content", f"{self._gap}{self._opener}{inner}{found}")]

    def _end_of_call(self) -> int:
        """Index of the first closing marker outside of JSON strings; -1 if there is none yet."""
        if not self._closer or self._closer not in self._buffer:
            return -1
        tokens = re.finditer(f"{_STRING}|{re.escape(self._closer)}", self._buffer)
        return next((token.start() for token in tokens if token[0] == self._closer), -1)

    def _hold(self, kind: Literal["content", "reasoning"], mark: str, is_end: bool) -> list[AnswerPart]:
        """Emit the buffer except a suffix that may start a marker, or whitespace before one."""
        text = self._buffer
        if not is_end:
            held = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
            text = text[: len(text) - held].rstrip()
        self._buffer = self._buffer[len(text) :]
        return [AnswerPart(kind, text)] if text else []


def _merged(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Adjacent parts of one kind, joined."""
    merged: list[AnswerPart] = []
    for part in parts:
        if merged and part.call is None and merged[-1].call is None and merged[-1].kind == part.kind:
            merged[-1] = AnswerPart(part.kind, merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def _compact(text: str) -> str:
    """The start of a text without whitespace and without its code fence."""
    if "```json".startswith(text):
        return ""
    fence = _FENCE.match(text)
    return "".join(text[fence.end() if fence else 0 :].split())


def _read_calls(text: str) -> list[ToolCall]:
    """The calls of a text that consists of calls only, fenced or not; else none."""
    text = text.strip()
    if fence := _FENCE.match(text):
        text = text[fence.end() :].removesuffix("```").strip()
    try:
        return [_call_of(written) for written in _values(text)]
    except (ValueError, RecursionError):
        return []


def _not_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


# Numbers are checked but not parsed: they may exceed Python's limits.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_not_json)


def _values(text: str) -> Iterator[str]:
    """The JSON text of each value in a sequence; lists are flattened."""
    at = 0
    while at < len(text):
        _, stop = _JSON.raw_decode(text, at)
        value = text[at:stop]
        yield from _values(value[1:-1].strip()) if value.startswith("[") else [value]
        at = _BETWEEN.match(text, stop).end()  # type: ignore[union-attr]


def _members(written: str) -> dict[str, str]:
    """The members of a JSON object as JSON text; empty for another value."""
    members, at = {}, 1
    while written.startswith("{") and (key := _KEY.match(written, at)):
        _, at = _JSON.raw_decode(written, key.end())
        members[json.loads(key[1])] = written[key.end() : at]
    return members


def _call_of(written: str) -> ToolCall:
    """A call from its JSON under any known key names. Raises ValueError if it is not a call."""
    members = _members(written)
    members = _members(members.get("function", "")) or members
    name = next((members[key] for key in NAME_KEYS if key in members), "null")
    arguments = next((members[key] for key in ARGUMENTS_KEYS if key in members), "{}")
    if arguments.startswith('"'):
        # A lone surrogate is not valid text; its escape is kept.
        arguments = json.loads(arguments).encode("utf-8", "backslashreplace").decode()
    if not name.startswith('"') or not isinstance(_JSON.decode(arguments), dict):
        raise ValueError("not a call")
    name = json.loads(name).encode().decode()
    # Mistral's template accepts only ids of nine alphanumeric characters.
    return ToolCall(secrets.token_hex(5)[:9], name, arguments)


def parse_answer(parser: AnswerParser, text: str) -> tuple[str, str, list[ToolCall]]:
    """Text, reasoning and calls of a complete answer."""
    parts = [*parser.push(text), *parser.flush()]
    of_kind = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return of_kind["content"], of_kind["reasoning"], [part.call for part in parts if part.call is not None]
