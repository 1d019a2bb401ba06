"""The words of a prompt's question and of its segments. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spec_stack.prefill.prompt_text import PromptText

# Scripts without spaces count by the character.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W{_CHARACTERS}]+")
ONE_CHARACTER = re.compile(f"[{_CHARACTERS}]")
"""A word of one character."""


@dataclass(frozen=True)
class Question:
    """A prompt's question.

    words: their weights, up to 1; without text, tokens in place of words. tokens: the question's own tokens, which are
    not searched for its words.
    """

    words: Mapping[Hashable, float]
    tokens: frozenset[int]

    def starting_at(self, first: int) -> Question:
        """The question of the text from token `first` on, whose own tokens may all be before it."""
        return Question(self.words, frozenset(at - first for at in self.tokens if at >= first))


def read_question(text: PromptText, weights: Mapping[int, float]) -> Question:
    """The words of these tokens, each with the largest weight of the tokens that it ends in."""
    words: dict[Hashable, float] = {}
    for run in _runs(sorted(weights)):
        for word, token in _words_by_token(text, run):
            words[word] = max(words.get(word, 0.0), weights[token])
    return Question(words, frozenset(weights))


def words_of(text: PromptText, tokens: Sequence[int]) -> Sequence[Hashable]:
    """The words of these tokens, in order."""
    if text.pieces is None:
        return [text.token_ids[at] for at in tokens]
    return _WORD.findall("".join([text.pieces[at] for at in tokens]).lower())


def _runs(tokens: Sequence[int]) -> list[range]:
    """Increasing tokens as runs without gaps."""
    cuts = [0, *(at for at in range(1, len(tokens)) if tokens[at] != tokens[at - 1] + 1), len(tokens)]
    return [range(tokens[start], tokens[stop - 1] + 1) for start, stop in pairwise(cuts) if start < stop]


def _words_by_token(text: PromptText, tokens: Sequence[int]) -> list[tuple[Hashable, int]]:
    """The words of these tokens, each with the token in which it ends."""
    if text.pieces is None:
        return [(text.all_ids[at], at) for at in tokens]
    pieces = text.all_pieces or ()
    owner = [at for at in tokens for _ in pieces[at].lower()]
    joined = "".join(pieces[at] for at in tokens).lower()
    return [(match.group(), owner[match.end() - 1]) for match in _WORD.finditer(joined)]
