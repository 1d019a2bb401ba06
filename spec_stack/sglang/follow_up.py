"""Place a prompt that goes on from an earlier one: what it is built on, and what comes back of the dropped text.

No SGLang here. The rule of a session in Python (`prefill.recall`), for many conversations that nobody announces: a
prompt says itself what it goes on from, by the tokens it begins with. What is remembered of a turn is which positions
the target was given, in the order in which they were written; whether their KV is still cached is the radix cache's
business, since the same tokens at the same positions in the same order are the same KV.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.queries import find_candidates
from spec_stack.prefill.recall import clip_spans, dropped_positions, recall, select_turn, shared_words
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.units import make_units
from spec_stack.sglang.draft_pool import Ints, num_common
from spec_stack.sglang.protocols import RunningRequest

# Turns that were forgotten, of which it is still known what they had kept from the first token on: a cache may hold it
# for longer than the turn is remembered.
_MOST_LEADS = 4096
# A beginning counts from this part of the prompt on: one in four tokens.
_LEAST_SHARE = 4


@dataclass(frozen=True)
class Beginning:
    """The beginning that a prompt is built on: its first num_tokens tokens, of which the target was given those at
    `positions`, in the order in which they were written."""

    num_tokens: int = 0
    positions: tuple[int, ...] = ()

    @classmethod
    def dense(cls, num_tokens: int) -> Beginning:
        return cls(num_tokens, tuple(range(num_tokens)))

    @property
    def is_dense(self) -> bool:
        return len(self.positions) == self.num_tokens

    def is_worth_it(self, num_prompt_tokens: int) -> bool:
        """A short beginning is worth less than a selection of its own, which is the same on every server."""
        return _LEAST_SHARE * self.num_tokens >= num_prompt_tokens


@dataclass(frozen=True)
class Placement:
    """The tokens of a prompt that the target is given: token_ids at `positions`, in the order in which they are
    written.

    num_cached: tokens of the prompt that an earlier turn dealt with, kept or dropped. num_recalled: how many of the
    given ones come back.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    num_prompt_tokens: int
    num_cached: int = 0
    num_recalled: int = 0

    @property
    def keep_rate(self) -> float:
        return len(self.positions) / self.num_prompt_tokens

    @property
    def inherits_all(self) -> bool:
        """Return whether the target is given all that an earlier turn dealt with, if anything."""
        return sum(position < self.num_cached for position in self.positions) == self.num_cached

    @property
    def is_whole(self) -> bool:
        return len(self.positions) == self.num_prompt_tokens


def place(
    prompt_ids: Sequence[int],
    beginning: Beginning,
    importance: torch.Tensor | None,
    prunes: bool,
    recalling: SessionConfig | None,
    config: PrefillConfig,
    protected: Sequence[Span],
    pieces: Sequence[str] | None = None,
) -> Placement:
    """Return what the target is given of a prompt.

    Parameters
    ----------
    prompt_ids
        The whole prompt.
    beginning
        What stays as it was.
    importance
        (num_prompt_tokens,), by which new text is pruned and old text is recalled; None where a scorer does without.
    prunes
        Whether the text after the beginning is pruned. If not, all of it is kept.
    recalling
        How much of what the beginning lacks comes back; None is nothing.
    config
        How the new text is selected.
    protected
        Half-open spans of the prompt that are never dropped.
    pieces
        The text of every token; None where it is not known, and chunks take the place of lines.
    """
    start = beginning.num_tokens
    recalled: list[int] = []
    if recalling is not None:
        dropped = dropped_positions(beginning.positions, start)
        wanted = importance
        if wanted is None:
            # Without attention no chunk is worth more than another.
            wanted, recalling = torch.ones(start), replace(recalling, restore_threshold=2.0)
        units = make_units(start, pieces and pieces[:start], config)
        words = None
        if recalling.anchor_threshold is not None:
            words = shared_words(prompt_ids, units, find_candidates(len(prompt_ids), pieces, protected))
        recalled = recall(wanted, dropped, units, config, recalling, words)
    evidence = Evidence(prompt_ids, None, protected, pieces, importance)
    turn = select_turn(evidence, beginning.positions, start, recalled, config if prunes else None, protected)
    positions = (*beginning.positions[: turn.num_held], *turn.positions)
    token_ids = tuple(prompt_ids[position] for position in positions)
    return Placement(token_ids, positions, len(prompt_ids), start, len(recalled))


def new_spans(protected: Sequence[Span], beginning: Beginning) -> list[Span]:
    """The spans of what comes after a beginning, counted from there."""
    return clip_spans(protected, beginning.num_tokens)


def protected_lead(protected: Sequence[Span]) -> int:
    """How many tokens from the first one on every selection keeps."""
    end = 0
    for start, stop in sorted(protected):
        if start > end:
            break
        end = max(end, stop)
    return end


class _Turn:
    """One prompt as it was placed, and its reply once that has ended.

    num_unchosen: tokens from the first one on that are kept whatever is asked. num_chosen: those that are kept at all,
    without a gap.
    """

    def __init__(
        self, prompt_ids: Ints, positions: tuple[int, ...], request: RunningRequest, num_unchosen: int
    ) -> None:
        self.token_ids, self.positions, self.num_prompt_tokens = prompt_ids, positions, len(prompt_ids)
        # SGLang drops a request that was aborted while it waited, and nobody else is to hold it. One that has begun to
        # reply will end, and SGLang may let it go in the very round in which it does.
        self._waiting: weakref.ref[RunningRequest] | None = weakref.ref(request)
        self._replying: RunningRequest | None = None
        self.num_chosen = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], enumerate(positions)))
        self.num_unchosen = min(num_unchosen, self.num_chosen)

    def take_in_reply(self) -> None:
        """A reply's last token may have been through no model, so it counts as new text. Of a request that is gone
        there is no reply."""
        request = self._replying
        if request is None and self._waiting is not None:
            request = self._waiting()
        if request is None:
            self.end()
            return
        if not request.finished():
            self._replying = request if request.output_ids else None
            return
        # A step may have gone on past the end.
        start, reply = len(self.token_ids), request.output_ids[: request.finished_len][:-1]
        self.token_ids = np.concatenate([self.token_ids, np.asarray(reply, dtype=np.int64)])
        self.positions = (*self.positions, *range(start, start + len(reply)))
        self.end()

    @property
    def has_ended(self) -> bool:
        """Return whether no reply is to come."""
        return self._waiting is None

    def end(self) -> None:
        self._waiting = self._replying = None


class Turns:
    """Turns of which something was dropped, or brought back, by tenant; the oldest go first.

    Parameters
    ----------
    most_tokens : int
        Tokens of all remembered turns together. The newest turn stays whatever its length.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._turns: OrderedDict[int, tuple[Hashable, _Turn]] = OrderedDict()
        self._answering: list[_Turn] = []
        self._leads: OrderedDict[tuple[Hashable, bytes], int] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(
        self,
        namespace: Hashable,
        prompt_ids: Sequence[int],
        positions: tuple[int, ...],
        request: RunningRequest,
        num_unchosen: int = 0,
    ) -> None:
        """Remember a turn. Its reply is taken in when the request has ended.

        num_unchosen: tokens from the first one on that any question would have kept.
        """
        turn = _Turn(np.asarray(prompt_ids, dtype=np.int64), positions, request, num_unchosen)
        self._turns[self._next] = namespace, turn
        self._answering.append(turn)
        self._next += 1
        num_tokens = sum(len(kept.token_ids) for _, kept in self._turns.values())
        while num_tokens > self._most_tokens and len(self._turns) > 1:
            _, (owner, oldest) = self._turns.popitem(last=False)
            num_tokens -= len(oldest.token_ids)
            self._keep_lead(owner, oldest)
            oldest.end()

    def _keep_lead(self, owner: Hashable, turn: _Turn) -> None:
        if turn.num_chosen == turn.num_unchosen:
            return
        lead = owner, turn.token_ids[: turn.num_chosen].tobytes()
        self._leads[lead] = min(turn.num_unchosen, self._leads.pop(lead, turn.num_unchosen))
        if len(self._leads) > _MOST_LEADS:
            self._leads.popitem(last=False)

    def take_in_replies(self) -> None:
        """Called once per round of the scheduler, since requests do not live on after their end."""
        for turn in self._answering:
            turn.take_in_reply()
        self._answering = [turn for turn in self._answering if not turn.has_ended]

    def clear(self) -> None:
        self._turns.clear()
        self._answering.clear()
        self._leads.clear()

    def find(self, namespace: Hashable, prompt_ids: Sequence[int]) -> Beginning:
        """The longest beginning in common with a turn whose whole prompt is in it; of equal ones the newest. All but
        the last token counts, since that one has to be asked again.

        What was kept of a turn was chosen by all of its prompt, the question too. So only who goes on from that
        question takes it over: a neighbour who shares the document alone gets a selection of its own.

        A slot that was written after the first token that differs has seen it, so it does not belong to the beginning,
        wherever it stands.
        """
        best: tuple[int, int, _Turn] | None = None
        for number, turn, length in self._in_common(namespace, prompt_ids):
            if length >= turn.num_prompt_tokens and (best is None or length >= best[0]):
                best = length, number, turn
        if best is None:
            return Beginning()
        length, number, turn = best
        self._turns.move_to_end(number)
        return Beginning(length, tuple(takewhile(lambda position: position < length, turn.positions)))

    def num_unchosen(self, namespace: Hashable, prompt_ids: Sequence[int], num_cached: int) -> int:
        """Count, of a prompt's first tokens that are cached without a gap, those that no turn's choice put there.

        num_cached: how many are cached. A turn that kept as many from the first one on may have brought them, and then
        counts with those alone that any question would have kept.
        """
        least = num_cached
        for _, turn, length in self._in_common(namespace, prompt_ids):
            if length < turn.num_prompt_tokens and min(length, turn.num_chosen) >= num_cached:
                least = min(least, turn.num_unchosen)
        # Nobody can go on from a turn that was forgotten, so its choice counts for nobody.
        cached = np.asarray(prompt_ids[:num_cached], dtype=np.int64).tobytes()
        for (owner, lead), num_unchosen in self._leads.items():
            if owner == namespace and lead.startswith(cached):
                least = min(least, num_unchosen)
        return least

    def _in_common(self, namespace: Hashable, prompt_ids: Sequence[int]) -> Iterator[tuple[int, _Turn, int]]:
        """A tenant's turns by their number, each with the length of what it and a prompt have in common."""
        ids = np.asarray(prompt_ids[:-1], dtype=np.int64)
        for number, (owner, turn) in self._turns.items():
            if owner == namespace:
                length = num_common(turn.token_ids, ids)
                if length:
                    yield number, turn, length
