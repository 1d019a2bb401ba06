"""Prompts: plain text and chat messages to token ids, with the spans of a chat that must stay dense."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
Span = tuple[int, int]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens the tokenizer puts before one.

    An end-of-sequence token that it puts after is dropped: the text is to go on. Raises ValueError for text that
    is not valid Unicode.
    """
    _check_unicode(text)
    # verbose=False: a prompt over the models' positions is refused in our own words.
    ids = list(tokenizer(text, verbose=False).input_ids)
    plain = (
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if ids[-1:] == [tokenizer.eos_token_id]
        else ids
    )
    return ids[:-1] if len(ids) > len(plain) else ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid Unicode: {error}") from error


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Token ids of a chat rendered by the tokenizer's template, and the protected token spans: everything that
    is not the content of a user, assistant or tool message (the template's own tokens, the system message).

    Raises ValueError for messages of another form, or a tokenizer without a template.
    """
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': ..., 'content': ...}")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {message!r} in it")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give prompt= instead of messages=")
    text = _render(tokenizer, messages)
    _check_unicode(text)
    if not tokenizer.is_fast:
        # Without character offsets there is no telling what is content, so all of it stays dense.
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        return ids, [(0, len(ids))]
    # The template has rendered the special tokens already.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    prunable = _content_spans(tokenizer, text, messages)
    protected = [
        (index, index + 1)
        for index, (start, stop) in enumerate(encoded.offset_mapping)
        if not any(first <= start and stop <= last for first, last in prunable)
    ]
    return list(encoded.input_ids), protected


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def _content_spans(tokenizer: Any, text: str, messages: Sequence[Message]) -> list[Span]:
    """Character spans of the prunable contents, found by rendering marks in their place. Where the template does more
    than insert or strip the contents, nothing is prunable."""
    marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
    skeleton = _render(tokenizer, [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
    head, *pieces = re.split("|".join(marks), skeleton)
    for strips in (False, True):
        rebuilt, spans = head, []
        for message, piece in zip(messages, pieces, strict=False):
            content = message["content"].strip() if strips else message["content"]
            if message["role"] not in ("system", "developer"):
                spans.append((len(rebuilt), len(rebuilt) + len(content)))
            rebuilt += content + piece
        if rebuilt == text:
            return spans
    return []
