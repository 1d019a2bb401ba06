"""Rare words that segments share with the question, and headings that it names. Pure; milliseconds, no draft."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import sqrt

import torch

from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments
from spec_stack.prefill.words import ONE_CHARACTER, words_of

# Most segments that hold a rare word, and what the largest score by rare words adds to a factor of 1.
_MOST_SEGMENTS, _RARE_WORDS = 6, 2.0
# Shorter words count half: most are function words.
_FEWEST_LETTERS, _SHORT_WORD = 5, 0.5
# Ends of a heading beside Markdown's "#": a function's, a key's, a block's.
_HEADING_ENDS = (":", "\uff1a", "{")
# Least share of rare words that names a heading, what its section gets of its score, and the section's most tokens.
_NAMED, _OF_HEADING, _SECTION = 0.5, 0.8, 64
# Least sum of rare words for which a follow-up names a heading.
_NAMED_FOR_RECALL = 1 / 3


def question_and_bodies(
    inputs: ScoringInputs, segments: Segments, first: int = 0
) -> tuple[Mapping[Hashable, float], list[Sequence[Hashable]]]:
    """The question's words with their weights, and the words of every segment outside the question. first: as in
    `ScoringInputs.asked`."""
    asked = inputs.asked(first)
    bodies = [words_of(inputs.text, [at for at in range(*each) if at not in asked.tokens]) for each in segments]
    return asked.words, bodies


def raise_named(worth: torch.Tensor, inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Scores (..., num_segments) of worth (..., num_segments): segments that share rare words with the question count
    up to three times, and text under a heading that does gets most of the heading's score.

    It finds identifiers: a draft attends to all records of a kind alike, and the question names one of them. In code,
    Markdown and settings the name is in the heading, and the value lines below it. Without text, worth itself.
    """
    if inputs.pieces is None:
        return worth
    shared = shared_rare_words(inputs, segments)
    scores = worth * (1 + _RARE_WORDS * _shares(shared)).to(worth)
    raised = scores.clone()
    for heading, section in _named_sections(shared, inputs.pieces, segments):
        raised[..., section] = raised[..., section].maximum(_OF_HEADING * scores[..., heading, None])
    inputs.note_part("rare word", scores)
    inputs.note_part("heading", raised)
    return raised


def score_for_recall(inputs: ScoringInputs, segments: Segments) -> torch.Tensor:
    """Scores (num_segments,), fp32, of a conversation's old segments: rare words in common with the new text's
    question, and at least 1 for a heading that the question names and the text under it.
    """
    shared = shared_rare_words(inputs, segments, segments.num_tokens)
    scores = shared.clone()
    if inputs.pieces is not None:
        for heading, section in _named_sections(shared, inputs.pieces, segments):
            if shared[heading] >= _NAMED_FOR_RECALL:
                scores[heading : section.stop].clamp_(min=1)
    return scores


def shared_rare_words(inputs: ScoringInputs, segments: Segments, first: int = 0) -> torch.Tensor:
    """Rare words in common with the question (num_segments,), fp32.

    Each question word that at most six segments hold gives its weight divided by the root of their number to each.
    """
    weights, bodies = question_and_bodies(inputs, segments, first)
    if inputs.pieces is not None:
        weights = {word: weight * _significance(str(word)) for word, weight in weights.items()}
    found = [weights.keys() & body for body in bodies]
    num_with = Counter(word for words in found for word in words)
    rare = {word: weights[word] / sqrt(number) for word, number in num_with.items() if number <= _MOST_SEGMENTS}
    return torch.tensor([sum(rare.get(word, 0.0) for word in words) for words in found], dtype=torch.float32)


def _shares(scores: torch.Tensor) -> torch.Tensor:
    """Scores as shares of the largest."""
    return scores / scores.max().clamp(min=torch.finfo(scores.dtype).tiny)


def _significance(word: str) -> float:
    """What a word counts: half if it is short, except for numbers and words of one character."""
    is_short = word.isalpha() and len(word) < _FEWEST_LETTERS and not ONE_CHARACTER.match(word)
    return _SHORT_WORD if is_short else 1.0


def _named_sections(shared: torch.Tensor, pieces: Sequence[str], segments: Segments) -> Iterator[tuple[int, slice]]:
    """Each heading with enough of the rare words, and the segments of its section, at most _SECTION tokens.

    A section ends before the next heading of the same kind that is no deeper.
    """
    borders = segments.borders

    def heading_of(segment: int) -> tuple[str, int] | None:
        return _heading(_line(pieces, borders[segment], borders[segment + 1]))

    for at in torch.nonzero(_shares(shared) >= _NAMED)[:, 0].tolist():
        if (heading := heading_of(at)) is not None:
            end = bisect_right(borders, borders[at + 1] + _SECTION) - 1
            below = (other for other in range(at + 1, end) if _ends_section(heading_of(other), heading))
            yield at, slice(at + 1, next(below, end))


def _line(pieces: Sequence[str], start: int, stop: int) -> str:
    """The text of a segment, with its indentation where a token holds the line break before it too."""
    before = pieces[start - 1] if start else ""
    indentation = before.rpartition("\n")[2] if "\n" in before else ""
    return indentation + "".join(pieces[start:stop])


def _heading(line: str) -> tuple[str, int] | None:
    """Kind and depth of a heading: Markdown's level, or the indentation of a line that opens a block."""
    text = line.strip()
    if text.startswith("#"):
        return "#", len(text) - len(text.lstrip("#"))
    return ("block", len(line) - len(line.lstrip())) if text.endswith(_HEADING_ENDS) else None


def _ends_section(other: tuple[str, int] | None, heading: tuple[str, int]) -> bool:
    return other is not None and other[0] == heading[0] and other[1] <= heading[1]
