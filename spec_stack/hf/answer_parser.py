"""The parts of an answer as it grows: thoughts, text, and calls of tools."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NoReturn

from spec_stack.hf.answer_format import ARGUMENTS_KEYS, NAME_KEYS, THINK_CLOSES, THINK_OPENS, AnswerFormat
from spec_stack.types import AnswerPart, ToolCall

# What a small model writes around a call that its template marks in another way.
_FENCE = re.compile(r"```(?:json)?\s*")
_STARTS = ('{"name":"', '[{"name":"', '{"type":"function"')
_BETWEEN = re.compile(r"[\s,;]*")
# A JSON string as far as it has come.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"?'
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

Take = Callable[[bool], list[AnswerPart]]


class AnswerParser:
    """Takes an answer apart as its text comes.

    What cannot be parsed stays text, in the place where it was written. A call is handed out once it is whole.

    Parameters
    ----------
    answer_format : AnswerFormat
        How the template writes them.
    names : collection of str
        Tools that may be called; without any, nothing is taken for a call.
    in_thought : bool
        Whether the prompt ended with the beginning of a thought.
    """

    def __init__(self, answer_format: AnswerFormat, names: Collection[str] = (), in_thought: bool = False) -> None:
        tools = answer_format.tools if names else None
        self._names = frozenset(names)
        self._opener, self._closer = (tools.opener, tools.closer) if tools else ("", "")
        self._starts = (*_STARTS, _compact(tools.begin.removeprefix(self._opener))) if tools else ()
        self._thinks = answer_format.thinks
        self._take: Take = self._take_thought if in_thought else self._take_start
        self._buffer = ""
        # Blanks that belong to the template: they are dropped before the next part begins.
        self._blanks = "\n" if in_thought else ""
        # Blanks ahead of the mark of a call that may turn out to be none.
        self._gap = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Take in what was generated, and return the parts that are certain."""
        self._buffer += text
        return self._run(is_end=False)

    def flush(self) -> list[AnswerPart]:
        """What was held back: the answer has ended."""
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
        """The beginning of the answer behind blanks: a thought, a call without a mark, or text."""
        start = self._buffer.lstrip()
        if self._thinks and start.startswith(THINK_OPENS):
            self._go_on(start[len(THINK_OPENS) :], self._take_thought, "\n")
            return []
        may_think = self._thinks and THINK_OPENS.startswith(start)
        may_call = any(begin.startswith(_compact(start)) for begin in self._starts)
        if is_end or not (may_think or may_call):
            calls = any(_compact(start).startswith(begin) for begin in self._starts)
            self._take = self._take_bare if calls else self._take_text
        return []

    def _take_thought(self, is_end: bool) -> list[AnswerPart]:
        thought, found, rest = self._buffer.partition(THINK_CLOSES)
        if not found:
            return self._hold("reasoning", THINK_CLOSES, is_end)
        self._thinks = False
        self._go_on(rest, self._take_start, "\n")
        return [AnswerPart("reasoning", thought.rstrip())] if thought.strip() else []

    def _take_bare(self, is_end: bool) -> list[AnswerPart]:
        """An answer that is JSON from its beginning: calls if all of it is calls, else text."""
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
        """The JSON between two marks; a mark inside a string of it is none."""
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
        """Where the first closing mark outside of strings begins; -1 where none has come yet."""
        if not self._closer or self._closer not in self._buffer:
            return -1
        tokens = re.finditer(f"{_STRING}|{re.escape(self._closer)}", self._buffer)
        return next((token.start() for token in tokens if token[0] == self._closer), -1)

    def _hold(self, kind: Literal["content", "reasoning"], mark: str, is_end: bool) -> list[AnswerPart]:
        """Give the buffer out but for its end, which may be the beginning of a mark, or blanks ahead of one."""
        text = self._buffer
        if not is_end:
            held = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
            text = text[: len(text) - held].rstrip()
        self._buffer = self._buffer[len(text) :]
        return [AnswerPart(kind, text)] if text else []


def _merged(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Texts of one kind that follow each other as one."""
    merged: list[AnswerPart] = []
    for part in parts:
        if merged and part.call is None and merged[-1].call is None and merged[-1].kind == part.kind:
            merged[-1] = AnswerPart(part.kind, merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def _compact(text: str) -> str:
    """The beginning of a text without blanks, and without the fence that it may stand in."""
    if "```json".startswith(text):
        return ""
    fence = _FENCE.match(text)
    return "".join(text[fence.end() if fence else 0 :].split())


def _read_calls(text: str) -> list[ToolCall]:
    """The calls of a text that is nothing but calls, in a fence or without; else none."""
    text = text.strip()
    if fence := _FENCE.match(text):
        text = text[fence.end() :].removesuffix("```").strip()
    try:
        return [_call_of(written) for written in _values(text)]
    except (ValueError, RecursionError):
        return []


def _not_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


# Numbers are only checked: they may be too large for Python's.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_not_json)


def _values(text: str) -> Iterator[str]:
    """JSON values in a row, those of a list one by one, as they are written."""
    at = 0
    while at < len(text):
        _, stop = _JSON.raw_decode(text, at)
        value = text[at:stop]
        yield from _values(value[1:-1].strip()) if value.startswith("[") else [value]
        at = _BETWEEN.match(text, stop).end()  # type: ignore[union-attr]


def _members(written: str) -> dict[str, str]:
    """The members of a JSON object, as they are written; none of another value."""
    members, at = {}, 1
    while written.startswith("{") and (key := _KEY.match(written, at)):
        _, at = _JSON.raw_decode(written, key.end())
        members[json.loads(key[1])] = written[key.end() : at]
    return members


def _call_of(written: str) -> ToolCall:
    """A call as JSON has it, its name and arguments under any of their names. Raises ValueError for something else."""
    members = _members(written)
    members = _members(members.get("function", "")) or members
    name = next((members[key] for key in NAME_KEYS if key in members), "null")
    arguments = next((members[key] for key in ARGUMENTS_KEYS if key in members), "{}")
    if arguments.startswith('"'):
        # Half a character, which no answer can hold, is escaped as it was.
        arguments = json.loads(arguments).encode("utf-8", "backslashreplace").decode()
    if not name.startswith('"') or not isinstance(_JSON.decode(arguments), dict):
        raise ValueError("not a call")
    name = json.loads(name).encode().decode()
    # Mistral's template takes no other ids than nine letters and digits.
    return ToolCall(secrets.token_hex(5)[:9], name, arguments)


def parse_answer(parser: AnswerParser, text: str) -> tuple[str, str, list[ToolCall]]:
    """A whole answer's text, reasoning and calls."""
    parts = [*parser.push(text), *parser.flush()]
    of_kind = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return of_kind["content"], of_kind["reasoning"], [part.call for part in parts if part.call is not None]
