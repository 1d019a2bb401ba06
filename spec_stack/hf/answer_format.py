"""The format of tool calls and reasoning, learnt by rendering the chat template."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from spec_stack.hf.chat_template import MARKED_TOOL, ChatTemplate
from spec_stack.hf.prompt import special_tokens

logger = logging.getLogger(__name__)

# Keys of a call's name and of its arguments.
NAME_KEYS, ARGUMENTS_KEYS = ("name", "tool_name"), ("arguments", "parameters")
_QUESTION, _NAME, _ID = "marked question", "marked_tool_name", "marked001"
_CALL = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": '{"marked_key": "marked_value"}'}}
_ASKED = {"role": "user", "content": _QUESTION}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_ARGUMENTS = re.compile(r'\{\s*"marked_key"\s*:\s*"marked_value"\s*\}')
_BEFORE_ARGUMENTS = re.compile(rf'"\s*,\s*"({"|".join(ARGUMENTS_KEYS)})"\s*:\s*')
_BEFORE_NAME = re.compile(rf'"({"|".join(NAME_KEYS)})"\s*:\s*"$')


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

    def forced_call(self, tool_choice: object, tools: Sequence[Any] | None) -> ForcedCall | None:
        """The call that OpenAI's `tool_choice` forces, if any. Raises ValueError if the template shows none."""
        names = forced_names(tool_choice, tools)
        if names is None:
            return None
        if self.tools is None:
            raise ValueError("tool_choice cannot be forced: the chat template does not show how this model calls tools")
        parameters = _parameters(tools)
        return ForcedCall(self.tools, {name: json.dumps(parameters[name]) for name in names})

    def wanted(self, response_format: object, tool_choice: object, tools: Sequence[Any] | None) -> object:
        """The format of a request's answer: the given one, or that of a forced call. Raises ValueError for both."""
        forced = self.forced_call(tool_choice, tools)
        if forced is not None and response_format is not None:
            raise ValueError("give response_format or a forced tool_choice, not both")
        return forced or response_format

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
    chat = template.fit([_ASKED, _CALLED]).messages
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
    names = tool_names(tools)
    if isinstance(tool_choice, str) and tool_choice == "required":
        if not names:
            raise ValueError('tool_choice="required" needs tools, each {"type": "function", "function": {"name": …}}')
        return names
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}, got '
            f"{tool_choice!r}"
        )
    if name not in names:
        raise ValueError(f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}")
    return [name]


def tool_names(tools: Sequence[Any] | None) -> list[str]:
    """Tool names in order, from OpenAI's format; other tools have none."""
    return list(_parameters(tools))


def _parameters(tools: Sequence[Any] | None) -> dict[str, Any]:
    found = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters") or {"type": "object"}
    return found
