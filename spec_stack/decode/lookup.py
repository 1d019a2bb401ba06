"""Proposals that cost no model: the last tokens stood earlier in the text, and what followed them may follow again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import StepRecord
from spec_stack.decode.proposer import Guide, Means
from spec_stack.types import Proposal

_KEY = 3
_LONGEST = 32
_MAX_CANDIDATES = 16


@dataclass(frozen=True)
class Match:
    """An earlier place whose text ends as the whole text does.

    Parameters
    ----------
    length : int
        Tokens in common, as far as they were compared.
    start : int
        Where the text after it begins.
    """

    length: int
    start: int


class LookupIndex:
    """Finds where the end of a growing text stood before.

    Every token adds one entry per key length, and a look-up compares a bounded number of places, so a step takes
    microseconds whatever the length of the text.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        # Where the text after a key goes on; for the longest keys also where it did so before that.
        self._by_one: dict[int, int] = {}
        self._by_two: dict[tuple[int, int], int] = {}
        self._by_three: dict[tuple[int, int, int], int] = {}
        self._before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text."""
        first = len(self._text)
        self._text += token_ids
        text = self._text
        for start in range(max(first, 1), len(text)):
            self._by_one[text[start - 1]] = start
            if start >= 2:
                self._by_two[text[start - 2], text[start - 1]] = start
            if start >= _KEY:
                key = text[start - 3], text[start - 2], text[start - 1]
                earlier = self._by_three.get(key)
                if earlier is not None:
                    self._before[start] = earlier
                self._by_three[key] = start

    def match(self, tail_ids: Sequence[int] = ()) -> Match | None:
        """The longest match of the end of text and tail, of several the most recent; None where there is none.

        tail_ids: tokens after the text that are not certain yet. They are looked for, not in.
        """
        size = len(self._text)
        self._text += tail_ids
        try:
            return self._longest()
        finally:
            del self._text[size:]

    def _longest(self) -> Match | None:
        text = self._text
        if len(text) >= _KEY:
            best: Match | None = None
            start = self._by_three.get((text[-3], text[-2], text[-1]))
            for _ in range(_MAX_CANDIDATES):
                if start is None:
                    break
                length = self._common(start)
                if best is None or length > best.length:
                    best = Match(length, start)
                if length == _LONGEST:
                    break
                start = self._before.get(start)
            if best is not None:
                return best
        if len(text) >= 2 and (found := self._by_two.get((text[-2], text[-1]))) is not None:
            return Match(2, found)
        found = self._by_one.get(text[-1]) if text else None
        return None if found is None else Match(1, found)

    def _common(self, start: int) -> int:
        """How many tokens before `start` are those at the end, beyond a key that is known to be."""
        text, end = self._text, len(self._text)
        length, most = _KEY, min(_LONGEST, start)
        while length < most and text[start - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def continuation(
        self, match: Match, num_tokens: int, end_ids: Collection[int] = (), tail_ids: Sequence[int] = ()
    ) -> list[int]:
        """What follows a match; where that reaches the end of text and tail, it goes on with what it has given itself.

        No more than num_tokens, and nothing after a token of end_ids.
        """
        found: list[int] = []
        size = len(self._text)
        for at in range(match.start, match.start + num_tokens):
            beyond = at - size
            if beyond < 0:
                token_id = self._text[at]
            else:
                token_id = tail_ids[beyond] if beyond < len(tail_ids) else found[beyond - len(tail_ids)]
            found.append(token_id)
            if token_id in end_ids:
                break
        return found


class LookupProposer:
    """Look-up alone: no step touches the draft. How much of a continuation is verified the gate says."""

    def __init__(self, means: Means) -> None:
        self._end_ids, self._gate = means.end_ids, means.gate
        self._index = LookupIndex()

    def propose(self, committed_ids: Sequence[int], guide: Guide) -> Proposal:
        """The continuation of the longest match, as far as verifying it pays."""
        self._index.extend(committed_ids[len(self._index) :])
        match = self._index.match()
        if match is None:
            return Proposal()
        offer = self._gate.offer(match.length, min(guide.context.max_gamma, MAX_LOOKED_UP))
        token_ids = self._index.continuation(match, offer.num_tokens, self._end_ids)
        return Proposal(token_ids, num_looked_up=len(token_ids), match_length=match.length)

    def observe(self, record: StepRecord) -> None:
        self._gate.observe(record)
