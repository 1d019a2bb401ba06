"""The prompt in a request's body of OpenAI's or Anthropic's API: the chat that the draft reads, and the same body with
shorter texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spec_stack.hf.chat_template import as_functions, function_call

Place = tuple[str | int, ...]
"""Keys and indices that lead from a body to a text in it."""
PROMPT_FIELDS = ("messages", "prompt", "input")
"""The fields that hold a prompt: of chats and Anthropic's messages, of completions, of Responses."""


@dataclass
class _Message:
    """A message as the draft reads it. places: where its texts stand in the body; a text without one stays."""

    role: str
    texts: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def read(self, content: Any, place: Place) -> _Message:
        """Add a content's texts."""
        for text, at in _found(content, place):
            self.texts.append(text)
            self.places.append(at)
        return self

    def as_dict(self) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} for text in self.texts]
        content: Any = "".join(self.texts) if len(parts) < 2 else parts
        return {"role": self.role, "content": content} | ({"tool_calls": self.calls} if self.calls else {})


@dataclass(frozen=True)
class BodyPrompt:
    """A body's prompt.

    Parameters
    ----------
    body : mapping
        The body.
    chat : str or list of dict
        The prompt as the draft reads it: a text, or a chat in OpenAI's format of roles, texts and tool calls alone. Two
        bodies with the same chat are the same prompt; ids, names, reasoning, images and cache_control may differ.
    places : list of list of Place
        Where the texts of each message stand in the body.
    """

    body: Mapping[str, Any]
    chat: str | list[dict[str, Any]]
    places: list[list[Place]]

    def shortened(self, chat: Any) -> dict[str, Any]:
        """The body with the texts of a pruned chat."""
        body = dict(self.body)
        messages = [{"content": chat}] if isinstance(chat, str) else chat
        copied: set[Place] = set()
        for message, places in zip(messages, self.places, strict=True):
            for text, place in zip(_texts(message["content"]), places, strict=bool(places)):
                _put(body, place, text, copied)
        return body


def find_prompt(body: Mapping[str, Any], name: str | None = None) -> BodyPrompt:
    """The prompt in a body's field, by default the first of `PROMPT_FIELDS` that holds a text or a list: in Responses
    `prompt` names a stored one. Raises ValueError where there is no text to prune."""
    present = [each for each in PROMPT_FIELDS if each in body]
    holding = [each for each in present if isinstance(body[each], str | list)]
    name = name or [*holding, *present, PROMPT_FIELDS[0]][0]
    value: Any = body.get(name)
    place: Place = (name,)
    if name == "prompt":
        # A batch of one is that text.
        is_batch = isinstance(value, list) and len(value) == 1
        text = value[0] if is_batch else value
        if not isinstance(text, str):
            raise ValueError("prompt holds no text to prune")
        return BodyPrompt(body, text, [[(*place, 0) if is_batch else place]])
    # A system prompt beside the messages is read, and never pruned.
    system = [text for text, _ in _found(body.get("instructions" if name == "input" else "system"), ())]
    messages = [_Message("system", ["\n".join(system)])] if system else []
    if name == "input" and isinstance(value, str):
        messages.append(_Message("user", [value], [place]))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for at, item in enumerate(value):
            _add(messages, item, (name, at))
    if not any(message.places for message in messages):
        raise ValueError(f"{name} holds no text to prune")
    return BodyPrompt(body, [message.as_dict() for message in messages], [message.places for message in messages])


def _add(messages: list[_Message], item: Mapping[str, Any], place: Place) -> None:
    """Append a message or an item of Responses. Items without a text or a call are passed over."""
    if isinstance(role := item.get("role"), str):
        message = _Message(role)
        results = [at for at, part in enumerate(_list(item.get("content"))) if _is(part, "tool_result")]
        for at in results:
            own = item["content"][at].get("content")
            messages.append(_Message("tool").read(own, (*place, "content", at, "content")))
        message.read(item.get("content"), (*place, "content"))
        uses = [part for part in _list(item.get("content")) if _is(part, "tool_use")]
        functions = [call["function"] for call in as_functions(_list(item.get("tool_calls"))) if _has(call, "function")]
        message.calls = [function_call(each) for each in (*functions, *uses)]
        if message.texts or message.calls or not results:
            messages.append(message)
    elif str(item.get("type")).endswith("_output"):
        messages.append(_Message("tool").read(item.get("output"), (*place, "output")))
    elif isinstance(item.get("name"), str):
        if not (messages and messages[-1].role == "assistant"):
            messages.append(_Message("assistant"))
        messages[-1].calls.append(function_call(item))


def _found(content: Any, place: Place) -> Iterator[tuple[str, Place]]:
    """The texts of a content: itself, or its parts' with their places."""
    if isinstance(content, str):
        yield content, place
    for at, part in enumerate(_list(content)):
        if isinstance(part, str):
            yield part, (*place, at)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"], (*place, at, "text")


def _has(value: Any, name: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(name), Mapping)


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, Mapping) and part.get("type") == kind


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _put(body: dict[str, Any], place: Place, text: str, copied: set[Place]) -> None:
    """Set a text, in copies of what leads to it."""
    at: Any = body
    for depth, key in enumerate(place[:-1], 1):
        if place[:depth] not in copied:
            at[key] = at[key].copy()
            copied.add(place[:depth])
        at = at[key]
    at[place[-1]] = text
