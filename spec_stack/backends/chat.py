"""Prompts: plain text and chat messages to token ids, with the spans of a chat that must stay dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
Span = tuple[int, int]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens the tokenizer adds to one."""
    return list(tokenizer(text).input_ids)


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Token ids of a chat rendered by the tokenizer's template, and the protected token spans: everything that
    is not the content of a user, assistant or tool message (the template's own tokens, the system message).

    Raises ValueError for messages of another form, or a tokenizer without a template.
    """
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': ..., 'content': ...}")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give prompt= instead of messages=")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    # The template has rendered the special tokens already.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    prunable = _content_spans(text, messages)
    protected = [
        (index, index + 1)
        for index, (start, stop) in enumerate(encoded.offset_mapping)
        if not any(first <= start and stop <= last for first, last in prunable)
    ]
    return list(encoded.input_ids), protected


def _content_spans(text: str, messages: Sequence[Message]) -> list[Span]:
    """Character spans of the prunable contents. A content that the template altered is not found and stays dense."""
    spans: list[Span] = []
    cursor = 0
    for message in messages:
        content = message["content"].strip()
        start = text.find(content, cursor) if content else -1
        if start < 0:
            continue
        cursor = start + len(content)
        if message["role"] not in ("system", "developer"):
            spans.append((start, cursor))
    return spans
