"""Chat templates: what they render, the form of messages that each takes, and which texts they show as they are.

Templates are programs of strangers. What one does is learnt by rendering marks in place of texts.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# Messages of these roles are never pruned.
KEPT_ROLES = ("system", "developer")
# No request can guess the number in a mark. A part that a template dumps as JSON is not shown.
_MARK = f"\ue000{secrets.randbits(64)}:"
_SHOWN = re.compile(rf'(?<!"text": "){_MARK}(\d+)\ue001')
_MARKED_JSON = json.dumps({_MARK: _MARK}, ensure_ascii=False)
# A content of None that a template prints.
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
    """A tokenizer's template with the options of one chat; `more` are the caller's own template variables."""

    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat. Raises ValueError where the template refuses the messages."""
        try:
            apply = self.tokenizer.apply_chat_template
            return str(apply(list(messages), tokenize=False, **self.options, **self.more))
        except Exception as error:
            # For what messages lack a template may raise anything.
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> FittedChat:
        """The messages in the form that the template takes.

        A content is a text, a list of parts, or None beside calls; a call's arguments are a mapping or JSON text. The
        given form is preferred, then the one whose marks the template shows. Raises ValueError for messages of another
        form.
        """
        given = _checked(messages)
        fits: list[FittedChat] = []
        for form in (_as_given, _as_text, _as_parts):
            fits.append(self._fit([{**message, "content": form(message["content"])} for message in given]))
            if fits[-1].is_complete:
                return fits[-1]
        # Some templates take the contents of one role as parts, and of another as text.
        best = [next((fit for fit in fits if index in fit.shown), fits[0]) for index in range(len(given))]
        fits.append(self._fit([fit.messages[index] for index, fit in enumerate(best)]))
        # max() returns the first of equals.
        return max(fits, key=lambda fit: (len(fit.shown), fit.takes_text, -fit.num_nulls))

    def _fit(self, messages: list[dict[str, Any]]) -> FittedChat:
        messages, takes_text = self._fit_arguments(messages)
        return FittedChat(messages, self._try_render(_marked(messages)), takes_text)

    def _fit_arguments(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """Arguments that are JSON text as mappings, unless the template shows the text as it is."""
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
    """Messages in one form.

    Parameters
    ----------
    messages : list of dict
        The messages.
    skeleton : str
        The chat rendered with marks in place of its texts; empty where the template refuses marks.
    takes_text : bool
        Whether the template shows JSON arguments as they are.
    """

    messages: list[dict[str, Any]]
    skeleton: str
    takes_text: bool

    @property
    def is_complete(self) -> bool:
        return bool(self.skeleton) and len(self.shown) == len(self.messages) and not self.num_nulls

    @cached_property
    def shown(self) -> frozenset[int]:
        """The messages all of whose texts the template shows; none where it refuses marks."""
        found, marks = set(_SHOWN.findall(self.skeleton)), iter(_marks(self.messages))
        numbers = [[_SHOWN.findall(next(marks)) for _ in _texts(message["content"])] for message in self.messages]
        return frozenset(
            index for index, own in enumerate(numbers) if self.skeleton and all(found.issuperset(each) for each in own)
        )

    @property
    def num_nulls(self) -> int:
        return len(_NULL.findall(self.skeleton))

    def contents(self, text: str) -> Contents:
        """Find the messages' texts in the rendered chat.

        The text between two marks of the skeleton is the template's own. A message's text is found where it stands, as
        it is or stripped, between the template's two parts; where it does not, the template edits it (drops a thought,
        say), and the search goes on behind the next part.
        """
        if not self.skeleton:
            return Contents([], len(self.messages), None)
        owners = [(at, text) for at, message in enumerate(self.messages) for text in _texts(message["content"])]
        head, *rest = _SHOWN.split(self.skeleton)
        spans: list[tuple[int, int]] = []
        edited: set[int] = set()
        asked: dict[int, tuple[int, int]] = {}
        at = len(head) if text.startswith(head) else -1
        for number, part in zip(rest[::2], rest[1::2], strict=True):
            index, content = owners[int(number)]
            # Two texts may have nothing between them; behind the last one the chat ends.
            end = part if part or number != rest[-2] else None
            stop = _content_end(text, at, content, end) if at >= 0 else None
            if stop is None:
                edited.add(index)
                found = text.find(part, at) if part and at >= 0 else -1
                at = found + len(part) if found >= 0 else -1
                continue
            if self.messages[index]["role"] not in KEPT_ROLES:
                # A token may stand across two texts that have nothing between them.
                start = spans.pop()[0] if spans and spans[-1][1] == at else at
                spans.append((start, stop))
            if self.messages[index]["role"] == "user":
                asked = {index: (asked[index][0] if index in asked else at, stop)}
            at = stop + len(part)
        return Contents(spans, len(edited), next(iter(asked.values()), None))


def chat_parts(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[str | int]:
    """A chat in order: the template's own texts, and for each content, which is one string, its message's number.

    Without a template, or where it refuses these messages, the roles stand in its place.
    """
    skeleton = ""
    if getattr(tokenizer, "chat_template", None):
        skeleton = ChatTemplate(tokenizer, {"add_generation_prompt": True}).fit(messages).skeleton
    if not skeleton:
        written = [(f"{message['role']}: ", at, "\n\n") for at, message in enumerate(messages)]
        return [*(part for each in written for part in each), "assistant:"]
    return [int(part) if at % 2 else part for at, part in enumerate(_SHOWN.split(skeleton))]


@dataclass(frozen=True)
class Contents:
    """Where a rendered chat holds its messages' texts.

    Parameters
    ----------
    prunable : list of (int, int)
        Character spans of the texts that may be pruned, in order.
    num_edited : int
        Messages that the template edits, which may not.
    question : (int, int) or None
        Characters of the last user message.
    """

    prunable: list[tuple[int, int]]
    num_edited: int
    question: tuple[int, int] | None


def _content_end(text: str, at: int, content: str, part: str | None) -> int | None:
    """Where a content that begins at `at` ends; None where it is not there. part: the template's text after it, None
    for the end of the chat."""
    for written in (content, content.strip(), content.lstrip(), content.rstrip()):
        stop = at + len(written)
        if text.startswith(written, at) and (stop == len(text) if part is None else text.startswith(part, stop)):
            return stop
    return None


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each content None, a text or a list of text parts."""
    if not isinstance(messages, Sequence) and not isinstance(messages, Mapping):
        messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': ..., 'content': ...}")
    return [_checked_message(message) for message in messages]


def _checked_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {message!r} in it")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_checked_part(part) for part in content]
    is_text = isinstance(content, str | list) or (content is None and role == "assistant")
    if not isinstance(role, str) or not is_text:
        raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    return {**message, "content": content}


def _checked_part(part: Any) -> Mapping[str, Any]:
    part = _text_part(part) if isinstance(part, str) else part
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"content parts must be {{'type': 'text', 'text': ...}}, got {part!r}")
    return part


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(content: Any) -> list[str]:
    """The texts of a content in any form."""
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def _as_given(content: Any) -> Any:
    return content


def _as_text(content: Any) -> str:
    return "\n".join(_texts(content))


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [_text_part(content or "")]


def _marks(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A mark for each text of the messages; none for an empty one."""
    texts = [text for message in messages for text in _texts(message["content"])]
    return [f"{_MARK}{index}\ue001" if text else "" for index, text in enumerate(texts)]


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with marks in place of their texts."""
    marks = iter(_marks(messages))
    return [{**message, "content": _with_marks(message["content"], marks)} for message in messages]


def _with_marks(content: Any, marks: Iterator[str]) -> Any:
    if isinstance(content, list):
        return [{**part, "text": next(marks)} for part in content]
    mark = next(marks)
    return content if content is None else mark


def _with_arguments(message: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """A message with another form of its calls' arguments where these are text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_changed(call, change) for call in calls]} if calls else message


def _with_changed(call: Any, change: Callable[[str], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _parsed(text: str) -> Any:
    """The value of JSON; the text itself where a prompt could not show that value."""
    try:
        value = json.loads(text)
        # Infinite numbers and halves of characters raise.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return text
    return value
