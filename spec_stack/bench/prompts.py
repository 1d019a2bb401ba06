"""Prompts to measure with: of a file, and built-in ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spec_stack.calibrate.loss import Question
from spec_stack.calibrate.needles import FAMILIES, hide
from spec_stack.calibrate.shapes import SHAPES
from spec_stack.engine.request import Call
from spec_stack.hf.prompt import Message

Prompt = str | Sequence[Message] | Mapping[str, Any]
BUILT_IN = Path(__file__).with_name("prompts.jsonl")
# Most tokens of a document.
_LONGEST = 8192
_SHARE_OF_LIMIT = 0.9
# Shapes of a document's prompts, with a question each; and an instruction without one.
_SHAPES = ("question last", "question first", "long format")
_SUMMARY = "Summarize the text above in three sentences."


class Encoded(NamedTuple):
    """A prompt's key among the rows, its task, and its tokens."""

    key: str
    task: str
    token_ids: list[int]


def read_prompts(path: Path, *, with_answers: bool = False) -> list[dict[str, Any]]:
    """The prompts of a JSON Lines file, one a line. with_answers: `questions_of` reads them next. Raises ValueError,
    naming the line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    given = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = [_prompt_of(place, line, with_answers) for place, line in given]
    if not prompts:
        raise ValueError(f"{path} is empty; give a line of JSON per prompt")
    return prompts


def _prompt_of(place: str, line: str, with_answers: bool) -> dict[str, Any]:
    """A line's prompt, checked."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a JSON object, got {type(value).__name__}")
    content_of(value, place)
    # Files for other commands may have "answers" of another kind.
    if with_answers:
        _answers_of(value, place)
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


def questions_of(prompts: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Question]:
    """The prompts of a file with what their right answers hold, "answers"."""
    return [
        (call_of(given, tokenizer, number), _answers_of(given, f"prompt {number}"))
        for number, given in enumerate(prompts, start=1)
    ]


def _answers_of(given: Mapping[str, Any], place: str) -> list[str]:
    """What a right answer holds; a text is a list of one. Raises ValueError, naming the place, for anything else."""
    found = given.get("answers", ())
    answers = [found] if isinstance(found, str) else found
    # An empty text is in every answer.
    if isinstance(answers, Sequence) and all(isinstance(each, str) and each.strip() for each in answers):
        return list(answers)
    raise ValueError(f'{place}: "answers" must be a text or a list of texts, none of them empty, got {found!r}')


def document_prompts(documents: Mapping[str, str], tokenizer: Any, max_positions: int) -> list[str]:
    """Prompts over documents by name: facts hidden in each and asked for, in several shapes, and a request for a
    summary. Longer documents are cut. Raises ValueError for a document without lines."""
    longest, prompts = min(_LONGEST, round(_SHARE_OF_LIMIT * max_positions)), []
    for name, text in documents.items():
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        text = tokenizer.decode(ids[:longest]) if len(ids) > longest else text
        if not text.strip():
            raise ValueError(f"{name} is empty; give a text")
        rng = random.Random(0)
        for shape, wording in zip(_SHAPES, FAMILIES["fact"].needles, strict=False):
            haystack = hide(wording.needle(rng), text.split("\n"), rng)
            prompts.append(SHAPES[shape](haystack.document, haystack.question))
        prompts.append(f"{text}\n\n{_SUMMARY}")
    return prompts
