"""Prompts from the files users have: HumanEval, GSM8K, MT-bench and Spec-Bench as published, and our own JSON lines.

A row becomes a FilePrompt by the fields it has: "chat" or "text" (ours), "prompt" with "task_id" (HumanEval),
"question" with "answer" (GSM8K), "turns" with "category" (MT-bench, Spec-Bench).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_stack.hf.prompt import encode_messages, encode_text

_OWN = [Path(__file__).parents[1] / "prompts" / name for name in ("copying.jsonl", "profile.jsonl")]


@dataclass(frozen=True)
class FilePrompt:
    """task: code, math, … as the file has it. is_chat: goes through the chat template."""

    task: str
    text: str
    is_chat: bool

    def encode(self, tokenizer: Any, max_tokens: int | None = None) -> list[int]:
        """Token ids; a prompt of more than max_tokens loses its middle."""
        if self.is_chat:
            ids = encode_messages(tokenizer, [{"role": "user", "content": self.text}]).token_ids
        else:
            ids = encode_text(tokenizer, self.text)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        return ids[: max_tokens // 2] + ids[len(ids) - (max_tokens - max_tokens // 2) :]


def _parse(row: Mapping[str, Any]) -> FilePrompt:
    if "chat" in row or "text" in row:
        return FilePrompt(row["task"], row.get("chat", row.get("text")), "chat" in row)
    if "prompt" in row and "task_id" in row:
        return FilePrompt("code", row["prompt"], False)
    if "question" in row and "answer" in row:
        return FilePrompt("math", row["question"], True)
    if "turns" in row:
        return FilePrompt(row["category"], row["turns"][0], True)
    raise ValueError(f"a prompt row with the fields {sorted(row)} is of no known kind")


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file of JSON lines, packed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    # Not splitlines: separators such as U+2028 can stand inside a JSON string.
    return (line for line in text.split("\n") if line.strip())


def read_prompts(path: Path, tasks: Sequence[str] = ()) -> list[FilePrompt]:
    """All prompts of a file, those of the named tasks only where some are named. Raises ValueError for none."""
    prompts = [_parse(json.loads(line)) for line in lines_of(path)]
    chosen = [prompt for prompt in prompts if not tasks or prompt.task in tasks]
    if not chosen:
        raise ValueError(f"{path} holds no prompts" + (f" of the tasks {list(tasks)}" if tasks else ""))
    return chosen


def choose_prompts(sources: list[str], per_task: int) -> list[FilePrompt]:
    """Prompts of TASK=FILE or TASK=FILE:CATEGORY sources, evenly spread over each file; with no source the project's
    own, six per task."""
    if per_task < 1:
        raise ValueError(f"prompts per task must be 1 or more, got {per_task}")
    if not sources:
        own = [prompt for path in _OWN for prompt in read_prompts(path)]
        tasks = dict.fromkeys(prompt.task for prompt in own)
        return [prompt for task in tasks for prompt in [each for each in own if each.task == task][:per_task]]
    chosen = []
    for source in sources:
        task, separator, rest = source.partition("=")
        if not separator or not task:
            raise ValueError(f"{source!r} is not of the form TASK=FILE or TASK=FILE:CATEGORY")
        name, _, category = rest.partition(":")
        prompts = read_prompts(Path(name), [category] if category else ())
        stride = max(1, len(prompts) // per_task)
        chosen += [FilePrompt(task, prompt.text, prompt.is_chat) for prompt in prompts[::stride][:per_task]]
    return chosen
