"""The segments of a prompt, kept or dropped whole: lines and sentences of its text, or chunks of equal size.

Pure: tensors and strings. `spec_stack.tokenizers.vocabulary` makes the `pieces`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.structure import Unit, cut_text

# Keeps ceil(0.3 * 10) at 3, whatever 0.3 is in binary.
_ROUNDING = 1e-9
MOST_HEADS = 32
"""Most heads that are kept with a segment, its nearest ones: no text that means something nests deeper, and all heads
of all segments would take quadratic time."""


class Segments:
    """A prompt cut into lines and sentences, in order and without gaps, kept up to a budget of tokens.

    borders: (num_segments + 1,), strictly increasing from 0 to num_tokens: segment i is borders[i] up to borders[i +
    1]. owner: the segment of every token, (num_tokens,). heads: the segment that is kept with each, or -1,
    (num_segments,); none by default. labels: segments that are never kept but as heads.
    """

    def __init__(self, borders: Sequence[int], heads: Sequence[int] = (), labels: Collection[int] = ()) -> None:
        self.borders, self._labels = list(borders), labels
        self.heads = list(heads) or [-1] * len(self)
        sizes = torch.tensor(self.borders).diff()
        self.owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The half-open spans of tokens."""
        return pairwise(self.borders)

    @property
    def num_tokens(self) -> int:
        return self.borders[-1]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean per segment (num_segments,) of one value per token (num_tokens,)."""
        owner = self.owner.to(values.device)
        sums = torch.zeros(len(self), dtype=torch.float64, device=values.device).index_add_(0, owner, values.double())
        return (sums / torch.bincount(owner, minlength=len(self))).to(values.dtype)

    def mean_importance(self, importance: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
        """Score of every segment (num_segments,) by the importance of the tokens (num_tokens,).

        Forced tokens count 0: the first ones are attention sinks and would carry their line. Means of the others alone
        lose more: they raise lines that only reach into the ends (experiments/LOG.md, "How to answer").
        """
        first, last = config.forced_tokens
        inside = torch.zeros_like(importance)
        inner = slice(first, max(first, self.num_tokens - last))
        inside[inner] = importance[inner]
        return self.means(inside)

    def ends(self, config: PrefillConfig, free: Collection[int] = (), asking: Collection[int] = ()) -> set[int]:
        """The tokens that are kept whatever their scores: the segments that lie within keep_first and keep_last, with
        their heads. Half a line may say the opposite of the whole one.

        Labels in front are kept as heads alone: what they are labels of may be dropped. free: as for `chosen`; up to
        keep_last of them do not count in it: a chat's template stands behind its request. The last one that is not free
        is an end, however long. asking: tokens; a segment that holds one of them and reaches into keep_last is an end,
        since it may say how to answer.
        """
        first, last = config.forced_tokens
        free, asking = {*free}, {*asking}
        texts: Sequence[int] = [at for at in range(len(self)) if at not in self._labels] or range(len(self))
        front = [at for at in texts if self.borders[at + 1] <= first]
        paid = [at for at in range(self.num_tokens) if at not in free] or [self.num_tokens - 1]
        behind = max(paid[max(0, len(paid) - last)], self.num_tokens - 2 * last) if last else self.num_tokens

        def is_end(segment: int) -> bool:
            start, stop = self.borders[segment], self.borders[segment + 1]
            return start >= behind or stop > paid[-1] or (stop > behind and not asking.isdisjoint(range(start, stop)))

        back = next((at for at in texts if is_end(at)), len(self))
        return self.with_heads([*front, *range(back, len(self))]) if len(self) else set()

    def chosen(
        self,
        scores: torch.Tensor,
        config: PrefillConfig,
        keep_rate: float,
        free: Collection[int] = (),
        asking: Collection[int] = (),
    ) -> set[int]:
        """The kept tokens by scores (num_segments,); ties go to the earlier segment.

        At most ceil(keep_rate · num_tokens) tokens, those of `ends` included; segments that do not fit, with their
        heads, are skipped. free: tokens that are kept anyway, at no cost, even at the ends. asking: as for `ends`.
        """
        num_tokens, free = self.num_tokens, {*free}
        kept = self.ends(config, free, asking)
        left = max(math.ceil(keep_rate * num_tokens - _ROUNDING) - len(kept.difference(free)), 0)
        paid = bytearray(num_tokens)
        for position in (*kept, *(at for at in free if 0 <= at < num_tokens)):
            paid[position] = 1
        for segment in torch.argsort(scores, descending=True, stable=True).tolist():
            start, stop = self.borders[segment], self.borders[segment + 1]
            if segment in self._labels or all(paid[start:stop]):
                continue
            own = [at for at in self.with_heads([segment]) if not paid[at]]
            if len(own) <= left:
                kept.update(own)
                for at in own:
                    paid[at] = 1
                left -= len(own)
            if not left:
                break
        return kept

    def with_heads(self, segments: Iterable[int]) -> set[int]:
        """The tokens of some segments and of all heads that they need."""
        wanted = {at for segment in segments for at in self.chain(segment)}
        return {at for each in wanted for at in range(self.borders[each], self.borders[each + 1])}

    def chain(self, segment: int) -> list[int]:
        """A segment, its head, that one's head, and so on, up to MOST_HEADS."""
        chain: dict[int, None] = {}
        while segment >= 0 and segment not in chain and len(chain) <= MOST_HEADS:
            chain[segment] = None
            segment = self.heads[segment]
        return [*chain]


class ChunkSegments(Segments):
    """Chunks of `size` tokens, of which the last may have fewer (SpecPrefill, https://arxiv.org/abs/2502.02789)."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__([*range(0, num_tokens, size), num_tokens])
        self._size = size

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """As in Segments; the tokens that the last chunk lacks count as 0."""
        padded = torch.nn.functional.pad(values, (0, len(self) * self._size - len(values)))
        return padded.reshape(len(self), self._size).mean(dim=1)

    def mean_importance(self, importance: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
        """The mean importance; forced chunks are kept whole, whatever they count."""
        return self.means(importance)

    def chosen(
        self,
        scores: torch.Tensor,
        config: PrefillConfig,
        keep_rate: float,
        free: Collection[int] = (),
        asking: Collection[int] = (),
    ) -> set[int]:
        """ceil(keep_rate · num_chunks) chunks, the forced ends among them; free tokens are added."""
        forced = self._forced(config)
        budget = max(len(forced), math.ceil(keep_rate * len(self) - _ROUNDING))
        ranked = torch.argsort(scores, descending=True, stable=True).tolist()
        best = [chunk for chunk in ranked if chunk not in forced][: budget - len(forced)]
        return self.with_heads([*forced, *best])

    def ends(self, config: PrefillConfig, free: Collection[int] = (), asking: Collection[int] = ()) -> set[int]:
        """The tokens of the forced chunks, whatever is free or asks."""
        return self.with_heads(self._forced(config))

    def _forced(self, config: PrefillConfig) -> set[int]:
        num_chunks = len(self)
        return {*range(min(config.keep_first, num_chunks)), *range(max(0, num_chunks - config.keep_last), num_chunks)}


def forced_ends(num_tokens: int, config: PrefillConfig) -> set[int]:
    """The tokens at both ends of a prompt whose attention does not count."""
    first, last = config.forced_tokens
    return {*range(min(first, num_tokens)), *range(max(0, num_tokens - last), num_tokens)}


def make_segments(num_tokens: int, pieces: Sequence[str] | None, config: PrefillConfig) -> Segments:
    """Cut a prompt into segments by config.granularity and chunk_size.

    pieces: the text of every token, and of any behind the prompt; None without a tokenizer, and chunks replace lines.
    Raises ValueError for fewer pieces.
    """
    if config.granularity == "chunks" or pieces is None:
        return ChunkSegments(num_tokens, config.chunk_size)
    if len(pieces) < num_tokens:
        raise ValueError(f"{len(pieces)} pieces of text for {num_tokens} tokens")
    lines = find_lines(pieces)
    num_lines = bisect_left(lines.borders, num_tokens)
    return Segments([*lines.borders[:num_lines], num_tokens], lines.heads[:num_lines], lines.labels)


@dataclass(frozen=True)
class Lines:
    """The units of a text, in tokens.

    borders: (num_segments + 1,), token indices; a token belongs to the unit in which its text begins, or in which the
    line's break does, and a character of several tokens to the last of them. shifts: where a unit's text begins, in
    characters from the beginning of its first token. heads, labels: as in Segments. breaks: the labels that end a line.
    """

    borders: list[int]
    shifts: list[int]
    heads: list[int]
    labels: frozenset[int]
    breaks: frozenset[int]


def find_lines(pieces: Sequence[str]) -> Lines:
    """The lines, sentences and blocks of a text by the text of every token, each of at most LONGEST_UNIT tokens."""
    return _find_lines(tuple(pieces))


# The question, the selection and the written text need the same lines; a second text is a conversation's new part.
@lru_cache(maxsize=2)
def _find_lines(pieces: tuple[str, ...]) -> Lines:
    starts = [0, *accumulate(map(len, pieces))][:-1]

    def size(start: int, stop: int) -> int:
        return bisect_left(starts, stop) - bisect_left(starts, start)

    # Tokens may have no text at all.
    units = cut_text("".join(pieces), size) or [Unit(0, 0)]
    borders: list[int] = []
    owners: list[Unit] = []
    segment_of: list[int] = []
    for unit in units:
        begin = bisect_right(starts, unit.start) - 1 if unit.is_break else bisect_left(starts, unit.start)
        if not borders or borders[-1] < begin < len(pieces):
            borders.append(begin)
            owners.append(unit)
        # A unit inside of a token belongs to the one in which the token begins.
        segment_of.append(len(borders) - 1)
    heads = [segment_of[unit.head] if unit.head >= 0 else -1 for unit in owners]
    return Lines(
        [*borders, len(pieces)] if pieces else [0],
        [unit.start - starts[border] for unit, border in zip(owners, borders, strict=True)],
        [head if head != segment else -1 for segment, head in enumerate(heads)],
        frozenset(at for at, unit in enumerate(owners) if unit.is_label),
        frozenset(at for at, unit in enumerate(owners) if unit.is_break),
    )


def line_borders(pieces: Sequence[str]) -> list[int]:
    """Borders (num + 1,), token indices, of the lines, sentences and blocks of a text, with the breaks behind them."""
    lines = find_lines(pieces)
    return [border for at, border in enumerate(lines.borders) if at not in lines.breaks]
