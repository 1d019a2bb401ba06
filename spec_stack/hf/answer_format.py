"""How a chat template writes tool calls and thoughts, learnt from the template itself."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from spec_stack.hf.json_schema import json_rules
from spec_stack.hf.prompt import PromptSource, fit_messages, special_tokens

logger = logging.getLogger(__name__)

THINK_OPENS, THINK_CLOSES = "<think>", "</think>"
_NAME, _KEY, _VALUE, _ID = "marked_tool_name", "marked_key", "marked_value", "marked001"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "a tool",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_CALL = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}}
_ARGUMENTS = re.compile(r'\{\s*"marked_key"\s*:\s*"marked_value"\s*\}')
# What the name and the arguments of a call are called.
NAME_KEYS, ARGUMENTS_KEYS = ("name", "tool_name"), ("arguments", "parameters")


@dataclass(frozen=True)
class ToolFormat:
    """How a call is written: `begin`, its name, `middle`, its arguments as JSON, `end`.

    Qwen and Hermes: `<tool_call>\\n{"name": "`, `", "arguments": `, `}\\n</tool_call>`; Llama 3: `{"name": "`,
    `", "parameters": `, `}`; Mistral: `[{"name": "`, `", "arguments": `, `}]`. Special tokens, which no text shows, are
    left out.
    """

    begin: str
    middle: str
    end: str

    @property
    def opener(self) -> str:
        """The mark ahead of a call's JSON, `<tool_call>` say; empty where JSON alone tells a call."""
        return self._frame[0].strip()

    @property
    def closer(self) -> str:
        """The mark behind it."""
        return self._frame[1].strip()

    @property
    def _frame(self) -> tuple[str, str]:
        """What stands ahead of a call's JSON, and behind it. Raises ValueError where it holds none."""
        for bracket in re.finditer(r"[\[{]", self.begin):
            written = f"{self.begin[bracket.start() :]}{self.middle}{{}}{self.end}"
            with suppress(ValueError):
                _, stop = json.JSONDecoder().raw_decode(written)
                return self.begin[: bracket.start()], written[stop:]
        raise ValueError(f"the template writes no JSON around a call: {self.begin}…{self.middle}…{self.end}")


@dataclass(frozen=True)
class ForcedCall:
    """An answer that is one call of one of these tools.

    Parameters
    ----------
    tools : ToolFormat
        How the template writes it.
    schemas : mapping of str to str
        The tools by name, and the JSON schema of their arguments, as JSON.
    """

    tools: ToolFormat
    schemas: Mapping[str, str]
    name: ClassVar[str] = "a forced tool_choice"

    @property
    def marks(self) -> tuple[str, ...]:
        """What stands around a call, tokens of their own in many vocabularies."""
        return tuple(mark for mark in (self.tools.opener, self.tools.closer) if mark)

    def rules(self) -> Any:
        """Return the grammar of such an answer. Raises ValueError where the schemas make none."""
        from xgrammar import Grammar as Rules

        calls = []
        for name, schema in self.schemas.items():
            begin = self.tools.begin + json.dumps(name)[1:-1] + self.tools.middle
            calls.append(Rules.concat(_verbatim(begin), json_rules(schema), _verbatim(self.tools.end)))
        return calls[0] if len(calls) == 1 else Rules.union(*calls)


@dataclass(frozen=True)
class AnswerFormat:
    """The parts that an answer to a chat may hold beside text.

    Parameters
    ----------
    tools : ToolFormat or None
        How it calls tools; None where the template writes no calls.
    thinks : bool
        Whether it may begin with a thought, `<think> … </think>`.
    """

    tools: ToolFormat | None = None
    thinks: bool = False

    @classmethod
    def learn(cls, tokenizer: Any) -> AnswerFormat:
        """Render the template with a marked call, and remember what stands around its name and its arguments.

        Parameters
        ----------
        tokenizer : object or None
            The target's.

        Returns
        -------
        AnswerFormat
            Never an error: of a template that cannot be learnt all stays text.
        """
        if not getattr(tokenizer, "chat_template", None):
            return cls()
        try:
            thinks = THINK_CLOSES in str(tokenizer.get_chat_template(tools=[_TOOL]))
        except Exception:
            # One of several templates, none of which is the default.
            logger.info("the chat template cannot be told", exc_info=True)
            return cls()
        try:
            return cls(_learn_tools(tokenizer), thinks)
        except Exception:
            # Templates are programs of strangers, and many know no tools.
            logger.info("the chat template does not show how tools are called", exc_info=True)
            return cls(thinks=thinks)

    def forced_call(self, tool_choice: object, tools: Sequence[Any] | None) -> ForcedCall | None:
        """Return what an answer must be that has to call a tool; None where it need not.

        Parameters
        ----------
        tool_choice : str, mapping or None
            OpenAI's (see `forced_names`).
        tools : sequence, optional
            OpenAI's form of them.

        Raises
        ------
        ValueError
            As `forced_names`, and where the template does not show how tools are called.
        """
        names = forced_names(tool_choice, tools)
        if names is None:
            return None
        if self.tools is None:
            raise ValueError("tool_choice cannot be forced: the chat template does not show how this model calls tools")
        parameters = _parameters(tools)
        return ForcedCall(self.tools, {name: json.dumps(parameters[name]) for name in names})

    def begins_in_thought(self, rendered: str) -> bool:
        """Return whether a rendered chat ends with the beginning of a thought, in which the answer goes on."""
        return self.thinks and rendered.rstrip().endswith(THINK_OPENS)


def _learn_tools(tokenizer: Any) -> ToolFormat | None:
    asked = {"role": "user", "content": "marked question"}
    called = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    messages, _ = fit_messages(tokenizer, PromptSource(messages=[asked, called], tools=[_TOOL]))
    text = _render(tokenizer, messages, False)
    # The tools themselves are written somewhere before.
    matches = list(_ARGUMENTS.finditer(text, max(0, text.rfind("marked question"))))
    if not matches:
        return None
    arguments = matches[-1]
    name = text.rfind(_NAME, 0, arguments.start())
    head = text[text.rfind("marked question") + len("marked question") : name]
    special = [token for token in special_tokens(tokenizer) if token]
    # The header of the turn ends as a prompt does that asks for an answer; special tokens are no text of the answer.
    prompt = _render(tokenizer, messages[:1], True)
    header = prompt[prompt.rfind("marked question") + len("marked question") :]
    begin = _without(head.removeprefix(header) if head.startswith(header) else _last_part(head, special), special)
    tail = text[arguments.end() :]
    ends = [at for token in {tokenizer.eos_token, *special} if token and (at := tail.find(token)) >= 0]
    end = re.sub(rf',\s*"id":\s*"{_ID}"', "", tail[: min(ends, default=len(tail))]).rstrip()
    begin = re.sub(rf'"id":\s*"{_ID}",\s*', "", begin).lstrip()
    # Others than JSON (parameters as tags, say) are not parsed.
    middle = text[name + len(_NAME) : arguments.start()]
    names, keys = "|".join(NAME_KEYS), "|".join(ARGUMENTS_KEYS)
    if not re.fullmatch(rf'"\s*,\s*"({keys})"\s*:\s*', middle) or not re.search(rf'"({names})"\s*:\s*"$', begin):
        return None
    learnt = ToolFormat(begin, middle, end)
    logger.debug("a call is written between %r and %r", learnt.opener, learnt.closer)
    return learnt


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], is_asked: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False, add_generation_prompt=is_asked))


def _without(text: str, tokens: Sequence[str]) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text


def _last_part(text: str, tokens: Sequence[str]) -> str:
    """Return what comes after the last special token but one that opens a call."""
    cut = max((text.rfind(token) + len(token) for token in tokens if token in text), default=0)
    return text[cut:]


def forced_names(tool_choice: object, tools: Sequence[Any] | None) -> list[str] | None:
    """Names of the tools of which one must be called; None where none must.

    Parameters
    ----------
    tool_choice : str, mapping or None
        OpenAI's: "auto", "none", "required" or {"type": "function", "function": {"name": …}}.
    tools : sequence, optional
        OpenAI's form of them.

    Raises
    ------
    ValueError
        For another choice, one without tools, and a name that none of them has.
    """
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
    """Names of tools in OpenAI's form, in order; others have none."""
    return list(_parameters(tools))


def _parameters(tools: Sequence[Any] | None) -> dict[str, Any]:
    found = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters") or {"type": "object"}
    return found


def _verbatim(text: str) -> Any:
    from xgrammar import Grammar as Rules

    return Rules.from_ebnf(f"root ::= {json.dumps(text)}")
