"""Chat templates: rendering, the message format each accepts, and the texts that it prints unchanged, learnt by
rendering marks in place of texts."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# Messages of these roles are never pruned.
KEPT_ROLES = ("system", "developer")
# The number in a mark is unpredictable. A part that the template dumps as JSON does not count as shown.
_MARK = f"\ue000{secrets.randbits(64)}:"
_SHOWN = re.compile(rf'(?<!"text": "){_MARK}(\d+)\ue001')
_MARKED_JSON = json.dumps({_MARK: _MARK}, ensure_ascii=False)
# A printed None content.
_NULL = re.compile(r"\b(?:None|null)\b")
MARKED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "marked_tool_name",
        "description": "a tool",
        "parameters": {"type": "object", "properties": {"marked_key": {"type": "string"}}, "required": ["marked_key"]},
    },
}
"""A tool by whose name and key a rendered chat is searched."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's template with the options of one chat; `more`: further template variables."""

    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat. Raises ValueError if the template rejects the messages."""
        try:
            apply = self.tokenizer.apply_chat_template
            return str(apply(list(messages), tokenize=False, **self.options, **self.more))
        except Exception as error:
            # A template may raise anything for malformed messages.
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> FittedChat:
        """The messages in the first format, the given one foremost, in which the template writes all texts and calls.
        Raises ValueError for malformed messages, and for calls that a template for tools writes in no format."""
        given = _checked(messages)
        fits: list[FittedChat] = []
        for form in _FORMS:
            fits.append(self._fit([{**message, "content": form(message)} for message in given]))
            if fits[-1].is_complete:
                return fits[-1]
        # Some templates take one role's contents as parts and another's as text.
        fits.sort(key=lambda fit: not fit.shows_calls)
        best = [next((fit for fit in fits if index in fit.shown), fits[0]) for index in range(len(given))]
        fits.append(self._fit([fit.messages[index] for index, fit in enumerate(best)]))
        # max() returns the first maximum.
        found = max(fits, key=lambda fit: (len(fit.shown), fit.shows_calls, fit.takes_text, -fit.num_nulls))
        if not found.shows_calls:
            self._check_calls(found.messages)
        return found

    def _check_calls(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if a template that reads tool calls writes nothing of a message's calls."""
        if "tool_calls" not in str(self.more.get("chat_template") or self.tokenizer.chat_template):
            return
        text = self._try_render(messages)
        calling = [index for index, message in enumerate(messages) if message.get("tool_calls")]
        # Templates treat all empty contents alike, so the first message with one is enough.
        index = next((each for each in calling if not messages[each]["content"]), calling[0])
        without = {name: value for name, value in messages[index].items() if name != "tool_calls"}
        if text and text == self._try_render([*messages[:index], without, *messages[index + 1 :]]):
            raise ValueError(
                f"the chat template writes nothing of the tool calls of messages[{index}]; some templates write calls "
                "only beside a content of None, which this transformers removes: use one that writes them"
            )

    def _fit(self, messages: list[dict[str, Any]]) -> FittedChat:
        messages, takes_text = self._fit_arguments(messages)
        return FittedChat(messages, self._try_render(_marked(messages)), takes_text, self._shows_calls(messages))

    def _shows_calls(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether the template writes every call: some write none beside a content that is not None."""
        marks: list[str] = []

        def rename(function: Mapping[str, Any]) -> Mapping[str, Any]:
            marks.append(f"marked_name_{len(marks)}_{secrets.token_hex(4)}")
            return {**function, "name": marks[-1]}

        marked = [_with_functions(message, rename) for message in messages]
        text = self._try_render(marked) if marks else ""
        return all(mark in text for mark in marks)

    def _fit_arguments(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """JSON arguments as mappings, unless the template prints the text unchanged."""
        probe = [_with_arguments(message, lambda _: _MARKED_JSON) for message in messages]
        if probe == messages:
            return messages, False
        if _MARKED_JSON in self._try_render(probe):
            return messages, True
        return [_with_arguments(message, _parsed) for message in messages], False

    def _try_render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages)
        except ValueError:
            return ""


@dataclass(frozen=True)
class FittedChat:
    """Messages in one format, the chat rendered with marks (empty if rejected), and whether JSON arguments are printed
    unchanged and all tool calls written."""

    messages: list[dict[str, Any]]
    skeleton: str
    takes_text: bool
    shows_calls: bool

    @property
    def is_complete(self) -> bool:
        return bool(self.skeleton) and self.shows_calls and len(self.shown) == len(self.messages) and not self.num_nulls

    @cached_property
    def shown(self) -> frozenset[int]:
        """Indices of messages whose texts are all shown; none if marks are rejected."""
        found, marks = set(_SHOWN.findall(self.skeleton)), iter(_marks(self.messages))
        numbers = [[_SHOWN.findall(next(marks)) for _ in _texts(message["content"])] for message in self.messages]
        return frozenset(
            index for index, own in enumerate(numbers) if self.skeleton and all(found.issuperset(each) for each in own)
        )

    @property
    def parts(self) -> list[str | int]:
        """The template's texts and the indices of messages (of their texts, where they have parts) in order."""
        return [int(part) if at % 2 else part for at, part in enumerate(_SHOWN.split(self.skeleton))]

    @property
    def num_nulls(self) -> int:
        return len(_NULL.findall(self.skeleton))

    def turns(self, text: str) -> list[tuple[str, int, int]]:
        """Role and characters of each message's texts in the rendered chat, system messages left out; none where the
        template edits any text, but for blanks around it."""
        owners = [(message["role"], text) for message in self.messages for text in _texts(message["content"])]
        head, *rest = _SHOWN.split(self.skeleton)
        for clean in (str, str.strip):
            spans: list[tuple[str, int, int]] = []
            written = head
            for number, part in zip(rest[::2], rest[1::2], strict=True):
                role, content = owners[int(number)][0], clean(owners[int(number)][1])
                start, stop = len(written), len(written) + len(content)
                # A token may span two adjacent texts.
                if spans and spans[-1][::2] == (role, start):
                    start = spans.pop()[1]
                spans.append((role, start, stop))
                written += content + part
            if self.skeleton and written == text:
                return [span for span in spans if span[0] not in KEPT_ROLES and span[1] < span[2]]
        return []


def function_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's call of a function, from the name and the arguments of a call in any of the APIs' forms."""
    given = next((function[name] for name in ("arguments", "input") if function.get(name) is not None), "{}")
    arguments = given if isinstance(given, str) else json.dumps(given)
    return {"type": "function", "function": {"name": str(function.get("name")), "arguments": arguments}}


def as_functions(calls: Any) -> Any:
    """Tool calls with OpenAI's custom ones as calls of functions, the form that chat templates write."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        return calls
    return [function_call(call["custom"]) if _is_custom(call) else call for call in calls]


def _is_custom(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping)


def chat_parts(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[str | int]:
    """The chat's template texts and message indices in order; without a working template, role names for the texts."""
    if getattr(tokenizer, "chat_template", None):
        chat = ChatTemplate(tokenizer, {"add_generation_prompt": True}).fit(messages)
        if chat.skeleton:
            return chat.parts
    written = [(f"{message['role']}: ", at, "\n\n") for at, message in enumerate(messages)]
    return [*(part for each in written for part in each), "assistant:"]


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with each content checked to be None, a text or a list of text parts."""
    if not isinstance(messages, Sequence) and not isinstance(messages, Mapping):
        messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': ..., 'content': ...}")
    return [checked_message(message) for message in messages]


def checked_message(message: Any, takes_media: bool = False) -> dict[str, Any]:
    """A message whose content is None, a text or a list of parts. takes_media: also parts that are no texts. Raises
    ValueError for a malformed one."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {message!r} in it")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_checked_part(part, takes_media) for part in content]
    is_text = isinstance(content, str | list) or (content is None and role == "assistant")
    if not isinstance(role, str) or not is_text:
        raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    calls = as_functions(message.get("tool_calls") or [])
    _check_call_list(calls)
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _check_call_list(calls: Any) -> None:
    """Raise ValueError for tool calls in another form than OpenAI's; some templates take a function alone."""
    if isinstance(calls, Sequence) and not isinstance(calls, str | bytes):
        functions = [call.get("function", call) if isinstance(call, Mapping) else None for call in calls]
        if all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
            return
    raise ValueError(
        "a message's tool_calls must be a list of {'type': 'function', 'function': {'name': ..., 'arguments': ...}}, "
        f"got {calls!r}"
    )


def _checked_part(part: Any, takes_media: bool) -> Mapping[str, Any]:
    part = _text_part(part) if isinstance(part, str) else part
    if isinstance(part, Mapping):
        is_media = takes_media and part.get("type") != "text" and part.get("text") is None
        if is_media or isinstance(part.get("text"), str):
            return part
    raise ValueError(f"content parts must be {{'type': 'text', 'text': ...}}, got {part!r}")


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(content: Any) -> list[str]:
    """The texts of a content in any format."""
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def _as_text(message: Mapping[str, Any]) -> str:
    return "\n".join(_texts(message["content"]))


def _as_parts(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else [_text_part(content or "")]


_FORMS: tuple[Callable[[Mapping[str, Any]], Any], ...] = (
    lambda message: message["content"],
    _as_text,
    # DeepSeek R1's template writes no calls beside an empty text.
    lambda message: _as_text(message) or (None if message.get("tool_calls") else ""),
    _as_parts,
)


def _marks(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A mark for each non-empty text of the messages."""
    texts = [text for message in messages for text in _texts(message["content"])]
    return [f"{_MARK}{index}\ue001" if text else "" for index, text in enumerate(texts)]


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with marks in place of their texts."""
    marks, marked = iter(_marks(messages)), []
    for message in messages:
        own = [next(marks) for _ in _texts(message["content"])]
        content = message["content"] and own[0]
        if isinstance(message["content"], list):
            content = [{**part, "text": mark} for part, mark in zip(message["content"], own, strict=True)]
        marked.append({**message, "content": content})
    return marked


def _with_arguments(message: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """A message with its text arguments converted."""

    def convert(function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function.get("arguments")
        return {**function, "arguments": change(arguments)} if isinstance(arguments, str) else function

    return _with_functions(message, convert)


def _with_functions(
    message: dict[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """A message with the functions of its calls changed."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        calls.append({**call, "function": change(function)} if isinstance(function, Mapping) else call)
    return {**message, "tool_calls": calls}


def _parsed(text: str) -> Any:
    """The parsed JSON; the text itself if the value does not survive rendering."""
    try:
        value = json.loads(text)
        # Infinities and lone surrogates raise.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return text
    return value
