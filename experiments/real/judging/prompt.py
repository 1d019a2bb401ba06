"""A judging prompt: messages with roles, and the texts among them that its answer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.real.scoring import Encoded
from spec_stack.hf.prompt import encode_messages
from spec_stack.tokenizers.prompt_reader import PromptReader

Message = Mapping[str, Any]


@dataclass(frozen=True)
class JudgingPrompt:
    """Messages whose last request needs all of `evidence`, texts that stand in them once.

    name: unique. family: "requests", "languages", "unasked" or "agents". shape: how it is asked, a row of the table.
    medium: what hides the evidence. source: the document, which intervals are drawn over. Prompts with equal `group`
    are adjacent and share their beginning.
    """

    name: str
    family: str
    shape: str
    medium: str
    source: str
    group: str
    messages: Sequence[Message]
    evidence: tuple[str, ...]

    @property
    def half(self) -> str:
        """The half that the document belongs to: constants are chosen on "tune", and judged on "judge"."""
        return "tune" if int(self.group.rpartition("/")[2]) % 2 == 0 else "judge"


def encode(tokenizer: Any, prompt: JudgingPrompt) -> Encoded:
    """The rendered chat in tokens, and where its evidence is. Raises ValueError for evidence that is not there once."""
    chat = encode_messages(tokenizer, prompt.messages)
    offsets = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    spans = []
    for text in prompt.evidence:
        if chat.text.count(text) != 1:
            raise ValueError(f"{prompt.name}: {text!r} is there {chat.text.count(text)} times")
        first = chat.text.index(text)
        inside = [at for at, (start, stop) in enumerate(offsets) if start < first + len(text) and stop > first]
        spans.append((inside[0], inside[-1] + 1))
    reader = PromptReader(tokenizer)
    return Encoded(reader.with_pieces(reader.read(chat.token_ids, written=chat.turns)), spans)
