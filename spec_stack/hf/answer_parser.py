"""Chat answers: the format of tool calls and reasoning, learnt by rendering the chat template, and an incremental
parser of both."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from spec_stack.hf.chat_template import MARKED_TOOL, ChatTemplate
from spec_stack.hf.prompt import special_tokens
from spec_stack.types import AnswerPart, ToolCall

logger = logging.getLogger(__name__)

# Keys of a call's name and of its arguments.
NAME_KEYS, ARGUMENTS_KEYS = ("name", "tool_name"), ("arguments", "parameters")
_QUESTION, _NAME, _ID = "marked question", "marked_tool_name", "marked001"
_CALL = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": '{"marked_key": "marked_value"}'}}
_USER = {"role": "user", "content": _QUESTION}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_ARGUMENTS = re.compile(r'\{\s*"marked_key"\s*:\s*"marked_value"\s*\}')
_BEFORE_ARGUMENTS = re.compile(rf'"\s*,\s*"({"|".join(ARGUMENTS_KEYS)})"\s*:\s*')
_BEFORE_NAME = re.compile(rf'"({"|".join(NAME_KEYS)})"\s*:\s*"$')
# Markers that small models write around a call in place of the template's.
_FENCE = re.compile(r"```(?:json)?\s*")
_STARTS = ('{"name":"', '[{"name":"', '{"type":"function"')
# Characters in which an answer that is a call without a marker shows that it is one.
_LONGEST_OPENING = 512
_BETWEEN = re.compile(r"[\s,;]*")
# A possibly unfinished JSON string.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"?'
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks around reasoning. headers: marks that open another part of an answer."""

    opens: str
    closes: str
    headers: tuple[str, ...] = ()


THINK = ThoughtMarks("<think>", "</think>")
# In the order in which a template is searched for them.
_THOUGHTS = (
    THINK,
    ThoughtMarks("<thinking>", "</thinking>"),
    ThoughtMarks("<thought>", "</thought>"),
    ThoughtMarks("<reasoning>", "</reasoning>"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", ("<|channel|>final<|message|>",)),
)


@dataclass(frozen=True)
class ToolFormat:
    """How a call is written, without special tokens: `begin`, its name, `middle`, its arguments as JSON, `end`. Qwen,
    Hermes: `<tool_call>\\n{"name": "`, `", "arguments": `, `}\\n</tool_call>`."""

    begin: str
    middle: str
    end: str

    @property
    def opener(self) -> str:
        """The marker before a call's JSON, e.g. `<tool_call>`; empty where the JSON alone marks the call."""
        return self._frame[0].strip()

    @property
    def closer(self) -> str:
        """The marker after a call's JSON."""
        return self._frame[1].strip()

    @property
    def _frame(self) -> tuple[str, str]:
        """The text before and after a call's JSON. Raises ValueError if it contains no JSON."""
        for bracket in re.finditer(r"[\[{]", self.begin):
            written = f"{self.begin[bracket.start() :]}{self.middle}{{}}{self.end}"
            with suppress(ValueError):
                _, stop = json.JSONDecoder().raw_decode(written)
                return self.begin[: bracket.start()], written[stop:]
        raise ValueError(f"the template writes no JSON around a call: {self.begin}…{self.middle}…{self.end}")


@dataclass(frozen=True)
class ForcedCall:
    """An answer that must be one call of these tools. schemas: JSON schema text of each tool's arguments."""

    tools: ToolFormat
    schemas: Mapping[str, str]


@dataclass(frozen=True)
class AnswerFormat:
    """The parts of a chat answer besides text: the format of calls, if any, whether reasoning may open the answer, its
    marks, and the special tokens in those, which the text must contain."""

    tools: ToolFormat | None = None
    thinks: bool = False
    thought: ThoughtMarks = THINK
    shown: tuple[str, ...] = ()

    @classmethod
    def learn(cls, tokenizer: Any) -> AnswerFormat:
        """Learn the format from a tokenizer's template. Parts that cannot be learnt stay text; never raises."""
        if not getattr(tokenizer, "chat_template", None):
            return cls()
        answers = cls()
        try:
            answers = cls._learn_thought(tokenizer)
            return replace(answers, tools=_learn_tools(tokenizer))
        except Exception:
            # A template may raise anything, and many support no tools.
            logger.info("the chat template does not show how tools are called", exc_info=True)
            return answers

    @classmethod
    def _learn_thought(cls, tokenizer: Any) -> AnswerFormat:
        """The format without tools, by the marks that the template names."""
        template = str(tokenizer.get_chat_template(tools=[MARKED_TOOL]))
        for thought in _THOUGHTS:
            if thought.closes in template or (thought != THINK and thought.opens in template):
                written = (thought.opens, thought.closes, *thought.headers)
                shown = tuple(token for token in special_tokens(tokenizer) if any(token in mark for mark in written))
                return cls(None, True, thought, shown)
        return cls()

    def wanted(self, response_format: object, tool_choice: object, tools: Sequence[Any] | None) -> object:
        """The format of a request's answer: the given one, or that of the call that OpenAI's `tool_choice` forces.
        Raises ValueError for both, and for a call if the template shows none."""
        names = forced_names(tool_choice, tools)
        if names is None:
            return response_format
        if self.tools is None:
            raise ValueError("tool_choice cannot be forced: the chat template does not show how this model calls tools")
        if response_format is not None:
            raise ValueError("give response_format or a forced tool_choice, not both")
        parameters = _parameters(tools)
        return ForcedCall(self.tools, {name: json.dumps(parameters[name]) for name in names})

    def parser(self, tools: Sequence[Any] | None, rendered: str) -> AnswerParser:
        """A parser of the answer to a rendered chat with these tools."""
        return AnswerParser(self, _parameters(tools), self.begins_in_thought(rendered))

    def begins_in_thought(self, rendered: str) -> bool:
        """Whether a rendered chat ends with an open reasoning block."""
        return self.thinks and rendered.rstrip().endswith(self.thought.opens)

    def format_start(self, rendered: str) -> str:
        """The mark after which a response format applies; empty for the start of the answer. Raises ValueError if a
        grammar cannot write the marks before it."""
        if not rendered or not self.thinks:
            return ""
        if self.thought.headers:
            raise ValueError(
                f"response_format and a forced tool_choice cannot be had with this chat template: its answers begin "
                f"with {self.thought.opens!r} or {self.thought.headers[0]!r}, which no grammar writes; leave them out"
            )
        if not self.begins_in_thought(rendered):
            return ""
        if self.thought.closes in self.shown:
            raise ValueError(
                f"response_format and a forced tool_choice cannot be had behind an open thought that ends with the "
                f"special token {self.thought.closes!r}; turn thinking off by chat_template_kwargs, or leave them out"
            )
        return self.thought.closes


def _learn_tools(tokenizer: Any) -> ToolFormat | None:
    """Render a call with marks and split around its name and arguments; None unless the call is JSON."""
    template = ChatTemplate(tokenizer, {"tools": [MARKED_TOOL], "add_generation_prompt": False})
    chat = template.fit([_USER, _CALLED]).messages
    text = _behind_question(template.render(chat))
    matches = list(_ARGUMENTS.finditer(text))
    if not matches:
        return None
    arguments = matches[-1]
    name = text.rfind(_NAME, 0, arguments.start())
    prompt = ChatTemplate(tokenizer, {"tools": [MARKED_TOOL], "add_generation_prompt": True}).render(chat[:1])
    special = list(special_tokens(tokenizer))
    begin = _begin_of_answer(text[:name], _behind_question(prompt), special)
    begin = re.sub(rf'"id":\s*"{_ID}",\s*', "", begin).lstrip()
    middle, tail = text[name + len(_NAME) : arguments.start()], text[arguments.end() :]
    ends = [at for token in {tokenizer.eos_token, *special} if token and (at := tail.find(token)) >= 0]
    end = re.sub(rf',\s*"id":\s*"{_ID}"', "", tail[: min(ends, default=len(tail))]).rstrip()
    if not _BEFORE_ARGUMENTS.fullmatch(middle) or not _BEFORE_NAME.search(begin):
        return None
    return ToolFormat(begin, middle, end)


def _behind_question(text: str) -> str:
    # The template also writes the tool definitions, earlier.
    return text[text.rfind(_QUESTION) + len(_QUESTION) :]


def _begin_of_answer(turn: str, header: str, special: Sequence[str]) -> str:
    """The turn after the generation header, or else after its last special token; special tokens removed."""
    if not turn.startswith(header):
        return turn[max((turn.rfind(token) + len(token) for token in special if token in turn), default=0) :]
    turn = turn.removeprefix(header)
    for token in special:
        turn = turn.replace(token, "")
    return turn


def forced_names(tool_choice: object, tools: Sequence[Any] | None) -> list[str] | None:
    """Tool names of which OpenAI's `tool_choice` forces one; None if it forces none."""
    if tool_choice is None or (isinstance(tool_choice, str) and tool_choice in ("auto", "none")):
        return None
    names = list(_parameters(tools))
    if isinstance(tool_choice, str) and tool_choice == "required":
        if not names:
            raise ValueError('tool_choice="required" needs tools, each {"type": "function", "function": {"name": …}}')
        return names
    name = tool_choice
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            'tool_choice must be "auto", "none", "required", a tool\'s name or {"type": "function", "function": '
            f'{{"name": …}}}}, got {tool_choice!r}'
        )
    if name not in names:
        raise ValueError(f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}")
    return [name]


def _parameters(tools: Sequence[Any] | None) -> dict[str, Any]:
    """The schemas of arguments by tool name, from OpenAI's format; other tools have none."""
    found = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters") or {"type": "object"}
    return found


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
        num_matched = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        text = text[: len(text) - num_matched].rstrip()
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
