"""The segments of a prompt, kept or dropped whole: lines and sentences of its text, or chunks of equal size.

Pure: tensors and strings. `spec_stack.tokenizers.pieces` makes the `pieces`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from spec_stack.config import PrefillConfig

LONGEST_UNIT = 128
"""Most tokens of a line segment; a longer line or sentence is split."""
# What may close a sentence behind its stop, and what has to follow a stop that ends one: a space, or a script without
# spaces. So 759.41, file.py and "no.", end nothing.
_CLOSING = "[\"'`*_)\\]}\u2019\u201d\u00bb\u300d\u300f\uff09]*+"
_FOLLOWING = "(?=\\s|\\Z|[\u2010-\u206f\u3000-\u9fff\uac00-\ud7af\uff00-\uffef])"
# A run of stops is read once, from its first: otherwise one that ends nothing would take quadratic time.
_STOP = f"(?<![.!?])(?:[.!?]*+[\u3002\uff01\uff1f][.!?\u3002\uff01\uff1f]*+{_CLOSING}|[.!?]++{_CLOSING}{_FOLLOWING})"
# The end of a sentence or a line, with the line breaks behind it, and that of the text.
_END = re.compile(f"{_STOP}\n*|\n+|\\Z")
# Keeps ceil(0.3 * 10) at 3, whatever 0.3 is in binary.
_ROUNDING = 1e-9


class Segments:
    """A prompt cut into lines and sentences, in order and without gaps, kept up to a budget of tokens.

    borders: (num_segments + 1,), strictly increasing from 0 to num_tokens: segment i is borders[i] up to borders[i +
    1]. owner: the segment of every token, (num_tokens,).
    """

    def __init__(self, borders: Sequence[int]) -> None:
        self.borders = list(borders)
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

    def worth(self, importance: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
        """Score of every segment (num_segments,) by the importance of the tokens (num_tokens,).

        Forced tokens count 0: the first ones are attention sinks and would carry their line.
        """
        first, last = config.forced_tokens
        inside = torch.zeros_like(importance)
        inner = slice(first, max(first, self.num_tokens - last))
        inside[inner] = importance[inner]
        return self.means(inside)

    def ends(self, config: PrefillConfig) -> set[int]:
        """The tokens that are kept whatever their scores (keep_first, keep_last)."""
        return forced_ends(self.num_tokens, config)

    def chosen(
        self, scores: torch.Tensor, config: PrefillConfig, keep_rate: float, free: Collection[int] = ()
    ) -> set[int]:
        """The kept tokens by scores (num_segments,); ties go to the earlier segment.

        At most ceil(keep_rate · num_tokens) tokens, forced ends (keep_first, keep_last) included; segments that do not
        fit are skipped. free: tokens that are kept anyway, at no cost, even at the ends.
        """
        num_tokens = self.num_tokens
        kept = self.ends(config)
        left = max(math.ceil(keep_rate * num_tokens - _ROUNDING) - len(kept.difference(free)), 0)
        paid = bytearray(num_tokens)
        for position in (*kept, *(at for at in free if 0 <= at < num_tokens)):
            paid[position] = 1
        for segment in torch.argsort(scores, descending=True, stable=True).tolist():
            start, stop = self.borders[segment], self.borders[segment + 1]
            cost = stop - start - sum(paid[start:stop])
            if 0 < cost <= left:
                kept.update(range(start, stop))
                left -= cost
            if not left:
                break
        return kept


class ChunkSegments(Segments):
    """Chunks of `size` tokens, of which the last may have fewer (SpecPrefill, https://arxiv.org/abs/2502.02789)."""

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__([*range(0, num_tokens, size), num_tokens])
        self._size = size

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """As in Segments; the tokens that the last chunk lacks count as 0."""
        padded = torch.nn.functional.pad(values, (0, len(self) * self._size - len(values)))
        return padded.reshape(len(self), self._size).mean(dim=1)

    def worth(self, importance: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
        """The mean importance; forced chunks are kept whole, whatever they count."""
        return self.means(importance)

    def chosen(
        self, scores: torch.Tensor, config: PrefillConfig, keep_rate: float, free: Collection[int] = ()
    ) -> set[int]:
        """ceil(keep_rate · num_chunks) chunks, the forced ends among them; free tokens are added."""
        forced = self._forced(config)
        budget = max(len(forced), math.ceil(keep_rate * len(self) - _ROUNDING))
        ranked = torch.argsort(scores, descending=True, stable=True).tolist()
        best = [chunk for chunk in ranked if chunk not in forced][: budget - len(forced)]
        return self._tokens([*forced, *best])

    def ends(self, config: PrefillConfig) -> set[int]:
        """The tokens of the forced chunks."""
        return self._tokens(self._forced(config))

    def _forced(self, config: PrefillConfig) -> set[int]:
        num_chunks = len(self)
        return {*range(min(config.keep_first, num_chunks)), *range(max(0, num_chunks - config.keep_last), num_chunks)}

    def _tokens(self, chunks: Iterable[int]) -> set[int]:
        return {at for chunk in chunks for at in range(self.borders[chunk], self.borders[chunk + 1])}


def forced_ends(num_tokens: int, config: PrefillConfig) -> set[int]:
    """The tokens at both ends of a prompt that are kept whatever their scores."""
    first, last = config.forced_tokens
    return {*range(min(first, num_tokens)), *range(max(0, num_tokens - last), num_tokens)}


def make_segments(num_tokens: int, pieces: Sequence[str] | None, config: PrefillConfig) -> Segments:
    """Cut a prompt into segments by config.granularity and chunk_size.

    pieces: the text of every token; None without a tokenizer, and chunks replace lines. Raises ValueError for pieces of
    another length.
    """
    if config.granularity == "chunks" or pieces is None:
        return ChunkSegments(num_tokens, config.chunk_size)
    if len(pieces) != num_tokens:
        raise ValueError(f"{len(pieces)} pieces of text for {num_tokens} tokens")
    return Segments(line_borders(pieces))


def line_borders(pieces: Sequence[str]) -> list[int]:
    """Borders (num_segments + 1,), as token indices, of the lines and sentences of a text; segments of at most
    LONGEST_UNIT tokens.

    A character of several tokens has its text at the last of them, so that no border splits it. A token belongs to the
    segment in which its text begins.
    """
    stops = list(accumulate(map(len, pieces)))
    starts = [0, *stops[:-1]] if stops else []
    ends = (bisect_left(starts, match.end()) for match in _END.finditer("".join(pieces)))
    borders = [0]
    for end in (*ends, len(pieces)):
        while end - borders[-1] > LONGEST_UNIT:
            borders.append(borders[-1] + LONGEST_UNIT)
        if end > borders[-1]:
            borders.append(end)
    return borders
