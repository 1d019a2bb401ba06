"""Rare words that segments, or the heads kept with them, share with the question. Pure; milliseconds, no draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments
from spec_stack.prefill.words import ONE_CHARACTER, Question, words_of

# What the largest score by rare words adds to a factor of 1 (experiments/LOG.md, "Selection with fewer numbers").
_RARE_WORDS = 2.0
# Shorter words count half: most are function words, which are rare in a short text (experiments/LOG.md, "Recall by the
# words of selection" and "Question marks, again").
_FEWEST_LETTERS, _SHORT_WORD = 5, 0.5
# Recall alone, by the first of these: most segments that hold a rare word, which counts over the root of their number.
_MOST_SEGMENTS = 6

Words = Sequence[Sequence[Hashable]]


def words_of_segments(inputs: ScoringInputs, question: Question, segments: Segments) -> tuple[Words, Words]:
    """The words of every segment outside the question, and the same with those of the heads that are kept with it."""
    own = [words_of(inputs.text, [at for at in range(*each) if at not in question.tokens]) for each in segments]
    return own, [[word for at in segments.chain(segment) for word in own[at]] for segment in range(len(segments))]


def raise_named(scores: torch.Tensor, inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Scores (..., num_segments), up to three times as high where a segment shares rare words with the question, and at
    least those of a head that does, in proportion to its share of them.

    It finds identifiers: a draft attends to all records of a kind alike, and the question names one of them, or the
    heading, key or scope that it stands under. Without text, the scores themselves.
    """
    if inputs.pieces is None:
        return scores
    named = NamedSegments.of(inputs, segments)
    raised = named.raised_by_words(scores)
    inputs.note_part("rare word", raised)
    raised = named.raised_by_heads(raised)
    inputs.note_part("head", raised)
    return raised


@dataclass(frozen=True)
class NamedSegments:
    """What the question names. shares: of the most rare words that a segment shares with it. heads: the segment that is
    kept with each, or -1. Both (num_segments,).
    """

    shares: torch.Tensor
    heads: torch.Tensor

    @classmethod
    def of(cls, inputs: ScoringInputs, segments: Segments) -> NamedSegments:
        """Of a prompt; without text nothing is named."""
        shared = torch.zeros(len(segments)) if inputs.pieces is None else shared_rare_words(inputs, segments)
        return cls(shared / shared.max().clamp(min=torch.finfo(shared.dtype).tiny), torch.tensor(segments.heads))

    def raised_by_words(self, scores: torch.Tensor) -> torch.Tensor:
        return scores * (1 + _RARE_WORDS * self.shares.to(scores))

    def raised_by_heads(self, raised: torch.Tensor) -> torch.Tensor:
        """Scores that are raised by words, at least the head's times its share."""
        heads = self.heads.to(raised.device)
        of_heads = (self.shares.to(raised) * raised)[..., heads.clamp(min=0)]
        return raised.maximum(torch.where(heads < 0, 0.0, of_heads))


def score_for_recall(inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Scores (num_segments,), fp32, of a conversation's old segments: rare words in common with the new text's
    question."""

    def share(number: int) -> float:
        return 1 / number**0.5 if number <= _MOST_SEGMENTS else 0.0

    return shared_rare_words(inputs, segments, segments.num_tokens, share)


def _by_number(number: int) -> float:
    return 1 / number


def shared_rare_words(
    inputs: ScoringInputs, segments: Segments, first: int = 0, share: Callable[[int], float] = _by_number
) -> torch.Tensor:
    """Rare words in common with the question (num_segments,), fp32: each gives a share, a short one half of it, to the
    segments that hold it, and to those whose head holds it.

    first: as in `ScoringInputs.asked`. share: of a word that so many segments hold.
    """
    question = inputs.asked(first)
    own, with_heads = words_of_segments(inputs, question, segments)
    num_with = Counter(word for words in own for word in question.words.intersection(words))
    rare = {word: share(number) * (_SHORT_WORD if _is_short(word) else 1.0) for word, number in num_with.items()}
    sums = [sum(rare.get(word, 0.0) for word in dict.fromkeys(words)) for words in with_heads]
    return torch.tensor(sums, dtype=torch.float32)


def _is_short(word: Hashable) -> bool:
    """Whether a word has few letters; numbers and words of one character are not short."""
    return isinstance(word, str) and word.isalpha() and len(word) < _FEWEST_LETTERS and not ONE_CHARACTER.match(word)
