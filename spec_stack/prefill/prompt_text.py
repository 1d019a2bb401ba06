"""A prompt as every entry point reads it: its tokens, their texts, its turns, and the question if the caller names it.

Pure. `spec_stack.tokenizers.prompt_reader` makes it from token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from spec_stack.prefill.alignment import Span


@dataclass(frozen=True)
class ChatTurn:
    """The text of one message in a prompt. role: "user", "assistant" or "tool". span: half-open, of its tokens."""

    role: str
    span: Span


@dataclass(frozen=True)
class PromptText:
    """A prompt of N tokens of the target.

    Attributes
    ----------
    token_ids
        N tokens.
    pieces
        The text of every token, (N,); None without a tokenizer.
    template
        Half-open spans, sorted, of the chat template's tokens, the system message and tool definitions: always kept,
        and never the question.
    protected
        Half-open spans, sorted, that are kept too and may hold the question: the caller's, and the assistant's turns.
    turns
        The turns in order, between the template's spans; empty for a plain text.
    question
        The question's half-open span, where the caller names it; from N on it is of `question_ids`. None is to be
        found.
    question_ids, question_pieces
        Tokens and texts of a question that is not in the prompt. It is read behind the prompt.
    note
        What of a chat was not recognised, in words.
    """

    token_ids: Sequence[int]
    pieces: Sequence[str] | None = None
    template: Sequence[Span] = ()
    protected: Sequence[Span] = ()
    turns: Sequence[ChatTurn] = ()
    question: Span | None = None
    question_ids: Sequence[int] = ()
    question_pieces: Sequence[str] = ()
    note: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def kept(self) -> list[Span]:
        """The spans that are always kept, sorted and apart, within the text."""
        spans = ((max(start, 0), min(stop, len(self))) for start, stop in (*self.template, *self.protected))
        return union((start, stop) for start, stop in spans if start < stop)

    @property
    def num_kept(self) -> int:
        """Tokens that are always kept."""
        return sum(stop - start for start, stop in self.kept)

    @cached_property
    def all_ids(self) -> Sequence[int]:
        """The tokens, and those of a question behind them."""
        return [*self.token_ids, *self.question_ids] if self.question_ids else self.token_ids

    @cached_property
    def all_pieces(self) -> Sequence[str] | None:
        """The texts of `all_ids`."""
        if self.pieces is None or not self.question_ids:
            return self.pieces
        return [*self.pieces, *self.question_pieces]

    def starting_at(self, first: int) -> PromptText:
        """The text from token `first` on. A question before it is read behind the text."""
        if not first:
            return self
        question, ids, pieces = self.question, self.question_ids, self.question_pieces
        if question is not None:
            if question[0] < first:
                ids = self.all_ids[slice(*question)]
                pieces = () if self.all_pieces is None else self.all_pieces[slice(*question)]
                question = len(self), len(self) + len(ids)
            question = question[0] - first, question[1] - first
        return PromptText(
            token_ids=self.token_ids[first:],
            pieces=None if self.pieces is None else self.pieces[first:],
            template=clip_spans(self.template, first),
            protected=clip_spans(self.protected, first),
            turns=[
                ChatTurn(turn.role, (max(turn.span[0] - first, 0), turn.span[1] - first))
                for turn in self.turns
                if turn.span[1] > first
            ],
            question=question,
            question_ids=ids,
            question_pieces=pieces,
            note=self.note,
        )


def clip_spans(spans: Sequence[Span], start: int) -> list[Span]:
    """Half-open spans from `start` on, counted from there."""
    return [(max(first, start) - start, stop - start) for first, stop in spans if stop > start]


def union(spans: Iterable[Span]) -> list[Span]:
    """The tokens of these spans as sorted spans with gaps between them."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def between(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """The gaps between sorted spans in 0…num_tokens."""
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
