"""A suffix automaton over token ids: all substrings of the texts, their counts, and their successors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_NONE = -1
_ROOT = 0
# Suffixes of the text after which a token is counted, the longest first: a text that repeats itself endlessly has as
# many as tokens.
_MAX_COUNTED = 32


class Place(NamedTuple):
    """A text's place in an automaton. length: tokens of the text's end that occur in it; 0 for none."""

    state: int
    length: int


START = Place(_ROOT, 0)


class Step(NamedTuple):
    """The most frequent token after a text's end; of equally frequent ones the latest.

    length: matching tokens before it. num_seen: times it followed, 1 or more. num_others: times another token did.
    place: the place after it.
    """

    token_id: int
    length: int
    num_seen: int
    num_others: int
    place: Place


class SuffixAutomaton:
    """All substrings of a growing set of texts, in memory linear in their tokens.

    A state stands for the substrings with the same end positions. Blumer et al., "The smallest automaton recognizing
    the subwords of a text", https://doi.org/10.1016/0304-3975(85)90157-4; followed online as in SAM Decoding,
    https://arxiv.org/abs/2411.10666; proposals by frequency as in SuffixDecoding, https://arxiv.org/abs/2411.04975.
    Most states have one transition, held in lists; only those with several have a dictionary.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        # Per state: its suffix link, the length of its longest substring, its count, the count of its successors, and
        # the most frequent one with its state.
        self._link, self._length = [_NONE], [0]
        self._count, self._followed = [0], [0]
        self._token, self._target = [_NONE], [_NONE]
        # All successors, of states that have several.
        self._branches: dict[int, dict[int, int]] = {}
        self._last = _ROOT

    @property
    def place(self) -> Place:
        """The place at the end of the text."""
        return Place(self._last, self._length[self._last])

    @property
    def num_states(self) -> int:
        """At most two per token, and the empty one."""
        return len(self._link)

    def begin_text(self) -> None:
        """Begin another text, unconnected to the last one."""
        self._last = _ROOT

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the text, a few microseconds each."""
        for token_id in token_ids:
            before = self._last
            known = self._step(before, token_id)
            self._last = self._add(before, token_id) if known == _NONE else self._exactly(before, token_id, known)
            self._count_up(before, token_id)
            self.num_tokens += 1

    def follow(self, place: Place, token_id: int) -> Place:
        """The place after one token more, by the longest matching suffix; nothing is added."""
        state, length = self._settled(place)
        while True:
            target = self._step(state, token_id)
            if target != _NONE:
                return Place(target, length + 1)
            if state == _ROOT:
                return START
            state = self._link[state]
            length = self._length[state]

    def next(self, place: Place) -> Step | None:
        """The successor of the longest suffix that has one; None where only the empty suffix has."""
        state, length = self._settled(place)
        while state != _ROOT and self._token[state] == _NONE:
            state = self._link[state]
            length = self._length[state]
        if state == _ROOT:
            return None
        target = self._target[state]
        # Longer suffixes than these were not counted.
        count = max(self._count[target], 1)
        num_others = max(self._followed[state] - count, 0)
        return Step(self._token[state], length, count, num_others, Place(target, length + 1))

    def _settled(self, place: Place) -> Place:
        """The same place after splits of its state."""
        state, length = place
        while state != _ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return Place(state, length)

    def _step(self, state: int, token_id: int) -> int:
        if self._token[state] == token_id:
            return self._target[state]
        branches = self._branches.get(state)
        return _NONE if branches is None else branches.get(token_id, _NONE)

    def _new(self, length: int, like: int | None = None) -> int:
        """A new state of that length, without transitions or with another's."""
        for values, empty in ((self._link, _ROOT), (self._count, 0), (self._followed, 0), (self._token, _NONE)):
            values.append(empty if like is None else values[like])
        self._target.append(_NONE if like is None else self._target[like])
        self._length.append(length)
        return len(self._length) - 1

    def _add(self, state: int, token_id: int) -> int:
        """A state for the text extended by a token that is new after its longest suffixes."""
        link, token, target, branches = self._link, self._token, self._target, self._branches
        made = self._new(self._length[state] + 1)
        known = _NONE
        while state != _NONE and known == _NONE:
            if token[state] == _NONE:
                token[state], target[state] = token_id, made
            elif state in branches:
                branches[state][token_id] = made
            else:
                branches[state] = {token[state]: target[state], token_id: made}
            state = link[state]
            known = self._step(state, token_id) if state != _NONE else _NONE
        if known != _NONE:
            link[made] = self._exactly(state, token_id, known)
        return made

    def _exactly(self, state: int, token_id: int, target: int) -> int:
        """The state whose longest substring is `state`'s plus the token: `target`, or one split off it."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new(length, target)
        if target in self._branches:
            self._branches[clone] = dict(self._branches[target])
        self._link[target] = clone
        while state != _NONE and self._step(state, token_id) == target:
            if self._token[state] == token_id:
                self._target[state] = clone
            if state in self._branches:
                self._branches[state][token_id] = clone
            state = self._link[state]
        return clone

    def _count_up(self, state: int, token_id: int) -> None:
        """Count a token after the suffixes of the text before it, and update the most frequent one."""
        link, count, followed, token, targets = self._link, self._count, self._followed, self._token, self._target
        branches, counted = self._branches, _NONE
        for _ in range(_MAX_COUNTED):
            if state == _NONE:
                return
            target = targets[state] if token[state] == token_id else branches[state][token_id]
            if target != counted:
                count[target] += 1
                counted = target
            followed[state] += 1
            if token[state] != token_id and count[target] >= count[targets[state]]:
                token[state], targets[state] = token_id, target
            state = link[state]
