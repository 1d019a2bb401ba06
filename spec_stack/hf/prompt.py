"""Prompts: plain text and chat messages to token ids, with the spans of a chat that must stay dense."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Message = Mapping[str, str]
Span = tuple[int, int]


def encode_prompt(
    tokenizer: Any,
    vocab_size: int,
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    input_ids: Sequence[int] | torch.Tensor | None,
) -> tuple[list[int], list[Span]]:
    """Token ids of the one prompt given, and the half-open spans of it that are never pruned.

    Parameters
    ----------
    tokenizer : object or None
        The target's; None takes input_ids only.
    vocab_size : int
        Ids that the target knows.
    prompt, messages, input_ids
        A text, a chat, or token ids (N,) or (1, N): exactly one is not None.

    Raises
    ------
    ValueError
        For none or several, an empty one, one of the wrong type, ids outside the vocabulary.
    """
    if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages or input_ids")
    protected: list[Span] = []
    if input_ids is not None:
        prompt_ids = _check_ids(input_ids, vocab_size)
    elif tokenizer is None:
        raise ValueError("this generator was made without a tokenizer; give input_ids")
    elif messages is not None:
        prompt_ids, protected = encode_messages(tokenizer, messages)
    elif isinstance(prompt, str):
        prompt_ids = encode_text(tokenizer, prompt) if prompt else []
    else:
        raise ValueError(f"prompt must be one string, got {type(prompt).__name__}; see messages= and input_ids=")
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    return prompt_ids, protected


def _check_ids(input_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> list[int]:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input_ids must be one sequence of ints, got {type(input_ids).__name__}: {error}") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or (ids.numel() and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())):
        raise ValueError(f"input_ids must be one sequence of ints, got {ids.dtype} of shape {tuple(ids.shape)}")
    token_ids: list[int] = ids.tolist()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"input_ids must lie in 0…{vocab_size - 1}, the target's vocabulary")
    return token_ids


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
    """Character spans of the contents that may be pruned: those of all but system and developer messages.

    The contents are replaced by marks and the chat is rendered once more, so that the text between the marks is the
    template's own: for one user message "hi" that renders to `<user>hi<end>`, the skeleton is `<user>#0#<end>`, split
    into `<user>` and `<end>`, and the span is (6, 8). Where putting the contents back, as they are or stripped, does
    not give the text, the template does more with them, and nothing may be pruned.
    """
    marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
    skeleton = _render(tokenizer, [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
    head, *template_parts = re.split("|".join(marks), skeleton)
    for contents in (
        [message["content"] for message in messages],
        [message["content"].strip() for message in messages],
    ):
        rebuilt, spans = head, []
        for message, content, part in zip(messages, contents, template_parts, strict=False):
            if message["role"] not in ("system", "developer"):
                spans.append((len(rebuilt), len(rebuilt) + len(content)))
            rebuilt += content + part
        if rebuilt == text:
            return spans
    return []
