"""The words of a prompt's question and of its segments. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from spec_stack.prefill.prompt_text import PromptText, union

# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")
ONE_CHARACTER = re.compile(f"[{_CHARACTERS}]")
"""A word of one character."""


@dataclass(frozen=True)
class Question:
    """A prompt's question.

    words: without text, tokens in place of words. tokens: the question's own tokens, which are not searched for its
    words.
    """

    words: frozenset[Hashable]
    tokens: frozenset[int]

    def starting_at(self, first: int) -> Question:
        """The question of the text from token `first` on, whose own tokens may all be before it."""
        return Question(self.words, frozenset(at - first for at in self.tokens if at >= first))


def read_question(text: PromptText, tokens: Collection[int]) -> Question:
    """The question of these tokens."""
    words = {word for run in union((at, at + 1) for at in tokens) for word in words_of(text, range(*run))}
    return Question(frozenset(words), frozenset(tokens))


def words_of(text: PromptText, tokens: Sequence[int]) -> Sequence[Hashable]:
    """The words of these tokens, those of a question behind the text included, in order."""
    pieces = text.all_pieces
    if pieces is None:
        return [text.all_ids[at] for at in tokens]
    return _WORD.findall("".join([pieces[at] for at in tokens]).lower())
