"""The prompts of the table, and what is kept of their documents."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spec_stack import PrefillConfig, SpecStackGenerator

RATE = 0.25
CODE = (Path(__file__).parents[1] / "support" / "other_code_to_prune.txt").read_text().splitlines()
NAMES = ("Alice", "Bruno", "Carmen", "Dmitri", "Esther", "Farid")
RULES = "".join(f"Rule {number}: never mention the colour {number * 7} to a customer.\n" for number in range(12))
TOOL = {"type": "function", "function": {"name": "open_locker", "description": "opens", "parameters": {}}}
PREFILL = PrefillConfig(on_scoring_failure="raise", keep_rate=RATE, sparse_prefill="on")


@dataclass(frozen=True)
class Row:
    """A prompt: messages, or a text alone. protected: a part of the text that is protected. question: given."""

    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    protected: str = ""
    question: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> Any:
        return list(self.messages) if self.messages else self.text


def document(extra: Sequence[str] = ()) -> str:
    rng = random.Random(5)
    lines = [f"# {number}: {line.strip()}" for number, line in enumerate(CODE[:70]) if line.strip()]
    for name in NAMES:
        lines.insert(
            rng.randrange(4, len(lines) - 4), f"The locker of {name} has the number {rng.randrange(1000, 9999)}."
        )
    for line in extra:
        lines.insert(rng.randrange(4, len(lines) - 4), line)
    return "\n".join(lines)


# The tokens at a prompt's end that are always kept: without them they would cut a line of the document, which a Pruner
# keeps whole.
FORM = (
    "Answer in one line with the number alone, and say nothing else about it or about any of the other lockers here. "
    "Do not explain how you found it, and do not name the file."
)
# The model's own answers are kept whole, as a session has them in its cache.
ANSWER = tuple(f"{number}. This is what part {number} of the file does, in a few words." for number in range(8))
QUESTION = "What is the number of the locker of Carmen?"
DOCUMENT = document()
SYSTEM = {"role": "system", "content": RULES}


def chat(last: str, doc: str = DOCUMENT) -> tuple[dict[str, Any], ...]:
    return SYSTEM, {"role": "user", "content": f"{doc}\n\n{last}\n{FORM}"}


ROWS = {
    "plain text": Row(text=f"{DOCUMENT}\n\n{QUESTION}\n{FORM}\n"),
    "chat": Row(chat(QUESTION)),
    "tools": Row(chat(QUESTION), options={"tools": [TOOL]}),
    "three turns": Row(
        (
            SYSTEM,
            {"role": "user", "content": "I will show you a file."},
            {"role": "assistant", "content": "Please do."},
            {"role": "user", "content": DOCUMENT},
            {"role": "assistant", "content": "I have read it."},
            {"role": "user", "content": f"{QUESTION}\n{FORM}"},
        )
    ),
    "a long answer": Row(
        (
            SYSTEM,
            {"role": "user", "content": DOCUMENT},
            {"role": "assistant", "content": "\n".join(ANSWER)},
            {"role": "user", "content": f"{QUESTION}\n{FORM}"},
        )
    ),
    "no question mark": Row(chat("Give me the number of the locker of Esther.")),
    "question marks in code": Row(
        chat(
            "Give me the number of the locker of Bruno.",
            document(["const shown = user?.name ?? 'x'", "GET /items?id=77 HTTP/1.1", "return ok ? 1 : 0"]),
        )
    ),
    "protected question": Row(text=f"{DOCUMENT}\n\n{QUESTION}\n{FORM}\n", protected=QUESTION),
    "protected line": Row(text=f"{DOCUMENT}\n\n{QUESTION}\n{FORM}\n", protected=DOCUMENT.splitlines()[20]),
    "given question": Row(text=f"{DOCUMENT}\n\n{FORM}\n", question=QUESTION),
    "given question in a chat": Row(chat("Do as you were told."), question=QUESTION),
}


LINES = {*DOCUMENT.splitlines(), *ANSWER, *ROWS["question marks in code"].messages[1]["content"].splitlines()} - {
    QUESTION,
    FORM,
}


class Reads:
    """The text that a target's embedding reads."""

    def __init__(self, generator: SpecStackGenerator) -> None:
        self._tokenizer, self._weight = generator.tokenizer, generator.target.get_input_embeddings().weight
        self.ids: list[int] = []

    @contextmanager
    def of(self) -> Iterator[Reads]:
        self.ids = []

        def note(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if isinstance(module, torch.nn.Embedding) and module.weight.shape == self._weight.shape:
                self.ids += given[0].reshape(-1).tolist()

        hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield self
        finally:
            hook.remove()

    def text(self) -> str:
        return str(self._tokenizer.decode(self.ids))


def lines_of(text: str) -> frozenset[str]:
    """The lines of the documents that a text has."""
    return frozenset(line for line in LINES if line in text)


def lines_of_prompt(prompt: Any) -> frozenset[str]:
    """The lines of the documents that a text or messages have."""
    return lines_of(prompt if isinstance(prompt, str) else "\n".join(each["content"] for each in prompt))


def rendered(generator: SpecStackGenerator, row: Row) -> str:
    if not row.messages:
        return row.text
    return str(
        generator.tokenizer.apply_chat_template(
            list(row.messages), tokenize=False, add_generation_prompt=True, **row.options
        )
    )


def ids_of(generator: SpecStackGenerator, row: Row) -> list[int]:
    text, is_chat = rendered(generator, row), bool(row.messages)
    return list(generator.tokenizer(text, add_special_tokens=not is_chat).input_ids)


def by_text(generator: SpecStackGenerator, row: Row) -> dict[str, Any]:
    text = rendered(generator, row)
    found: dict[str, Any] = {"prompt": text, "question": row.question}
    if row.protected:
        start = text.index(row.protected)
        # With the break, as `Pruner` protects lines.
        found["protected"] = [(start, start + len(row.protected) + 1)]
    return found


def by_ids(generator: SpecStackGenerator, row: Row) -> dict[str, Any]:
    ids = ids_of(generator, row)
    found: dict[str, Any] = {"input_ids": ids, "question": row.question}
    if row.protected:
        text = rendered(generator, row)
        start = text.index(row.protected)
        offsets = generator.tokenizer(text, return_offsets_mapping=True).offset_mapping
        inside = [at for at, (a, b) in enumerate(offsets) if a <= start + len(row.protected) and b > start]
        found["protected"] = [(inside[0], inside[-1] + 1)]
    return found


def by_messages(generator: SpecStackGenerator, row: Row) -> dict[str, Any]:
    if not row.messages:
        return by_text(generator, row)
    return {"messages": list(row.messages), "question": row.question, **row.options}


GIVEN = {"messages": by_messages, "text": by_text, "ids": by_ids}
