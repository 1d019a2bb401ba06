"""The parts of an answer as it grows: thoughts, text, and calls of tools."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Literal

from spec_stack.hf.answer_format import THINK_CLOSES, THINK_OPENS, AnswerFormat
from spec_stack.types import AnswerPart, ToolCall

# What a small model writes around a call that its template marks in another way.
_FENCE = re.compile(r"```(?:json)?\s*")
_STARTS = ('{"name":"', '[{"name":"', '{"type":"function"')
_BETWEEN = re.compile(r"[\s,;]*")


class AnswerParser:
    """Takes an answer apart as its text comes.

    What cannot be parsed stays text, in the place where it was written. A call is told once it is whole.

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
        self._calls_tools = tools is not None
        self._thinks = answer_format.thinks
        self._take = self._begin_thought if in_thought else self._take_start
        self._buffer = ""
        # Blanks ahead of the mark of a call that may turn out to be none.
        self._gap = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Take in what was generated, and return the parts that are certain."""
        self._buffer += text
        return self._run(is_end=False)

    def flush(self) -> list[AnswerPart]:
        """Return what was held back: the answer has ended."""
        return self._run(is_end=True)

    def _run(self, is_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            before = self._take
            parts += self._take(is_end)
            if self._take == before:
                return _merged(parts)

    def _take_start(self, is_end: bool) -> list[AnswerPart]:
        """Return what the answer begins with, behind blanks: a thought, a call without a mark, or text."""
        start = self._buffer.lstrip()
        if self._thinks and start.startswith(THINK_OPENS):
            self._buffer, self._take = start[len(THINK_OPENS) :], self._begin_thought
            return []
        may_think = self._thinks and THINK_OPENS.startswith(start)
        may_call = self._calls_tools and any(begin.startswith(_compact(start)) for begin in _STARTS)
        if is_end or not (may_think or may_call):
            calls = self._calls_tools and any(_compact(start).startswith(begin) for begin in _STARTS)
            self._take = self._take_bare if calls else self._take_text
        return []

    def _begin_thought(self, is_end: bool) -> list[AnswerPart]:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer or is_end:
            self._take = self._take_thought
        return []

    def _take_thought(self, is_end: bool) -> list[AnswerPart]:
        thought, found, rest = self._buffer.partition(THINK_CLOSES)
        if not found:
            return self._hold("reasoning", THINK_CLOSES, is_end)
        self._buffer, self._take, self._thinks = rest, self._take_after_thought, False
        return [AnswerPart("reasoning", thought.rstrip())] if thought.strip() else []

    def _take_after_thought(self, is_end: bool) -> list[AnswerPart]:
        """The blank lines behind a thought are the template's."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer or is_end:
            self._take = self._take_start
        return []

    def _take_bare(self, is_end: bool) -> list[AnswerPart]:
        """An answer that is JSON from its beginning: calls if all of it is calls, else text."""
        if not is_end:
            return []
        calls = _read_bare(self._buffer, self._names)
        if calls is None:
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
        self._buffer, self._gap, self._take = rest, text[len(said) :], self._take_call
        return [AnswerPart("content", said)] if said else []

    def _take_call(self, is_end: bool) -> list[AnswerPart]:
        """The JSON between two marks."""
        inner, found, rest = self._buffer.partition(self._closer) if self._closer else (self._buffer, "", "")
        if not found and not is_end:
            return []
        self._buffer = rest
        call = _read_marked(inner)
        if call is None:
            self._take = self._take_text
            return [AnswerPart("content", f"{self._gap}{self._opener}{inner}{found}")]
        self._take = self._take_between
        return [AnswerPart("call", call=call)]

    def _take_between(self, is_end: bool) -> list[AnswerPart]:
        """The blanks behind a call are the template's."""
        self._buffer = self._buffer.lstrip()
        if self._buffer or is_end:
            self._take = self._take_text
        return []

    def _hold(self, kind: Literal["content", "reasoning"], mark: str, is_end: bool) -> list[AnswerPart]:
        """Give the buffer out but for its end, which may be the beginning of a mark, or blanks ahead of one."""
        held = 0
        if not is_end:
            held = max((n for n in range(1, len(mark)) if self._buffer.endswith(mark[:n])), default=0)
            unheld = self._buffer[: len(self._buffer) - held]
            held += len(unheld) - len(unheld.rstrip())
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
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
    return "".join(text[fence.end() if fence else 0 :].split())[: max(map(len, _STARTS))]


def _read_marked(text: str) -> ToolCall | None:
    try:
        return _call_of(json.loads(text))
    except ValueError:
        return None


def _read_bare(text: str, names: Collection[str]) -> list[ToolCall] | None:
    """The calls of a text that is nothing but calls of these tools, in a fence or without; else None."""
    text = _FENCE.sub("", text.strip(), count=1).removesuffix("```").strip() if "```" in text else text.strip()
    decoder, values, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
    except ValueError:
        return None
    calls = [_call_of(value) for value in values]
    if not calls or any(call is None or call.name not in names for call in calls):
        return None
    return [call for call in calls if call is not None]


def _call_of(value: Any) -> ToolCall | None:
    """A call as JSON has it, its arguments under either name; None for something else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    # Mistral's template takes no other ids than nine letters and digits.
    return ToolCall(secrets.token_hex(5)[:9], value["name"], json.dumps(arguments, ensure_ascii=False))


def parse_answer(parser: AnswerParser, text: str) -> tuple[str, str, list[ToolCall]]:
    """A whole answer's text, reasoning and calls."""
    parts = [*parser.push(text), *parser.flush()]
    of_kind = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return of_kind["content"], of_kind["reasoning"], [part.call for part in parts if part.call is not None]
