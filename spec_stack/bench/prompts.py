"""Prompts to measure with: of a file, and built-in ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_stack.engine.request import Call
from spec_stack.hf.prompt import Message

Prompt = str | Sequence[Message] | Mapping[str, Any]
BUILT_IN = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a JSON Lines file, one a line. Raises ValueError, naming the line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    prompts = [_prompt_of(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} is empty; give a line of JSON per prompt")
    return prompts


def _prompt_of(place: str, line: str) -> dict[str, Any]:
    """A line's prompt, checked."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a JSON object, got {type(value).__name__}")
    content_of(value, place)
    return value


def content_of(given: object, place: str) -> str | Sequence[Message]:
    """The text or the messages of a prompt. Raises ValueError, naming the place, for a malformed one."""
    found: Any = given
    if isinstance(given, Mapping):
        found = given.get("messages", given.get("prompt", given.get("text")))
    if isinstance(found, Sequence) and found:
        return found
    raise ValueError(f'{place} must be a text, or have "messages" (a list), "prompt" or "text" (a string)')


def call_of(given: Prompt, tokenizer: Any, number: int) -> Call:
    """A prompt as a call; a text is a user's message where the target has a chat template."""
    content = content_of(given, f"prompt {number}")
    if not isinstance(content, str):
        return Call(messages=list(content), tools=given.get("tools") if isinstance(given, Mapping) else None)
    has_template = getattr(tokenizer, "chat_template", None)
    return Call(messages=[{"role": "user", "content": content}]) if has_template else Call(prompt=content)
