"""Incremental parser of answers: reasoning, text and tool calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NoReturn

from spec_stack.hf.answer_format import ARGUMENTS_KEYS, NAME_KEYS, AnswerFormat
from spec_stack.types import AnswerPart, ToolCall

# Markers that small models write around a call in place of the template's.
_FENCE = re.compile(r"```(?:json)?\s*")
_STARTS = ('{"name":"', '[{"name":"', '{"type":"function"')
# Characters in which an answer that is a call without a marker shows that it is one.
_LONGEST_OPENING = 512
_BETWEEN = re.compile(r"[\s,;]*")
# A possibly unfinished JSON string.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"?'
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')


class AnswerParser:
    """Splits a streamed answer into reasoning, text and complete calls of these tools; text that does not parse stays
    text. in_thought: the prompt ends inside a reasoning block."""

    def __init__(self, answer_format: AnswerFormat, names: Collection[str] = (), in_thought: bool = False) -> None:
        tools = answer_format.tools if names else None
        self._names = frozenset(names)
        self._opener, self._closer = (tools.opener, tools.closer) if tools else ("", "")
        self._starts = (*_STARTS, _compact(tools.begin.removeprefix(self._opener))) if tools else ()
        self._thinks, self._thought, self._in_thought = answer_format.thinks, answer_format.thought, in_thought
        self._text = ""
        self._emitted: list[AnswerPart] = []

    def push(self, text: str) -> list[AnswerPart]:
        """Add generated text and return the parts that are final."""
        self._text += text
        return self._emit(is_end=False)

    def flush(self) -> list[AnswerPart]:
        """The rest at the end of the answer."""
        return self._emit(is_end=True)

    def _emit(self, is_end: bool) -> list[AnswerPart]:
        """The difference to the parts of the text before. Later text extends the last part and adds others."""
        before, self._emitted = self._emitted, _merged(self._parts(is_end))
        new = self._emitted[len(before) :]
        last = self._emitted[len(before) - 1] if before else None
        if last is not None and len(last.text) > len(before[-1].text):
            new.insert(0, AnswerPart(last.kind, last.text[len(before[-1].text) :]))
        return new

    def _parts(self, is_end: bool) -> Iterator[AnswerPart]:
        """The final parts of the text so far: reasoning, then calls without a marker or text."""
        rest, thinks, in_thought, marks = self._text, self._thinks, self._in_thought, self._thought
        while in_thought or (thinks and rest.lstrip().startswith(marks.opens)):
            rest = (rest if in_thought else rest.lstrip().removeprefix(marks.opens)).lstrip("\n")
            thought, found, rest = rest.partition(marks.closes)
            if not found:
                yield from _settled("reasoning", thought, marks.closes, is_end)
                return
            yield AnswerPart("reasoning", thought.rstrip())
            # Where each part has a header, a second thought may follow.
            in_thought, thinks, rest = False, bool(marks.headers), rest.lstrip("\n")
        start = rest.lstrip()
        may_think = thinks and any(mark.startswith(start) for mark in (marks.opens, *marks.headers))
        opening = _compact(start[:_LONGEST_OPENING])
        may_call = any(begin.startswith(opening) for begin in self._starts)
        is_bare = any(opening.startswith(begin) for begin in self._starts)
        if not is_end and (may_think or may_call or is_bare):
            return
        calls = _read_calls(rest) if is_bare else []
        if calls and all(call.name in self._names for call in calls):
            yield from (AnswerPart("call", call=call) for call in calls)
        else:
            header = next((each for each in marks.headers if start.startswith(each)), "")
            yield from self._text_and_calls(start.removeprefix(header) if header else rest, is_end)

    def _text_and_calls(self, text: str, is_end: bool) -> Iterator[AnswerPart]:
        """Text, and calls between two markers."""
        while self._opener and self._opener in text:
            before, _, inside = text.partition(self._opener)
            said = before.rstrip()
            yield AnswerPart("content", said)
            end = self._end_of_call(inside)
            if end < 0 and not is_end:
                return
            inner, rest = (inside[:end], inside[end:]) if end >= 0 else (inside, "")
            if calls := _read_calls(inner):
                yield from (AnswerPart("call", call=call) for call in calls)
                text = rest.removeprefix(self._closer).lstrip()
                continue
            inner, found, text = inside.partition(self._closer) if self._closer else (inside, "", "")
            yield AnswerPart("content", f"{before[len(said) :]}{self._opener}{inner}{found}")
        yield from _settled("content", text, self._opener, is_end)

    def _end_of_call(self, text: str) -> int:
        """Index of the first closing marker outside of JSON strings; -1 if there is none yet."""
        if not self._closer or self._closer not in text:
            return -1
        tokens = re.finditer(f"{_STRING}|{re.escape(self._closer)}", text)
        return next((token.start() for token in tokens if token[0] == self._closer), -1)


def _settled(kind: Literal["content", "reasoning"], text: str, mark: str, is_end: bool) -> Iterator[AnswerPart]:
    """The text without a suffix that may start a marker, or whitespace before one."""
    if mark and not is_end:
        held = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        text = text[: len(text) - held].rstrip()
    yield AnswerPart(kind, text)


def _merged(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Adjacent parts of one kind, joined; empty texts are left out."""
    merged: list[AnswerPart] = []
    for part in parts:
        if merged and part.call is None and merged[-1].kind == part.kind:
            merged[-1] = AnswerPart(part.kind, merged[-1].text + part.text)
        elif part.call is not None or part.text:
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
