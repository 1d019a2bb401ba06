"""Plans the prefill of a prompt that continues an earlier one: cached prefix and recalled text. No SGLang import.

As a session's `prefill.recall`, for conversations identified by their token prefix; KV stays with the radix cache.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.recall import dropped_positions, recall_dropped, select_turn
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.sglang.required_api import RunningRequest

Ints = npt.NDArray[np.int64]
# Least part of the prompt for a beginning to count: one in four tokens.
_LEAST_SHARE = 4


@dataclass(frozen=True)
class CachedPrefix:
    """The first num_tokens tokens of a prompt, of which the target has those at `positions`, in order."""

    num_tokens: int = 0
    positions: tuple[int, ...] = ()

    @classmethod
    def dense(cls, num_tokens: int) -> CachedPrefix:
        return cls(num_tokens, tuple(range(num_tokens)))

    @property
    def is_dense(self) -> bool:
        return len(self.positions) == self.num_tokens

    def is_worth_it(self, num_prompt_tokens: int) -> bool:
        """Return whether the prefix is long enough; else a selection of the whole prompt is worth more."""
        return _LEAST_SHARE * self.num_tokens >= num_prompt_tokens


@dataclass(frozen=True)
class PrefillPlan:
    """The target's part of a prompt: token_ids at `positions`, in order.

    num_cached: tokens that an earlier turn processed, kept or dropped. num_recalled: recalled tokens among these.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    num_prompt_tokens: int
    num_cached: int = 0
    num_recalled: int = 0

    @property
    def keep_rate(self) -> float:
        return len(self.positions) / self.num_prompt_tokens if self.num_prompt_tokens else 1.0

    @property
    def inherits_all(self) -> bool:
        """Return whether the target gets all that an earlier turn processed, if anything."""
        return sum(position < self.num_cached for position in self.positions) == self.num_cached

    @property
    def is_whole(self) -> bool:
        return len(self.positions) == self.num_prompt_tokens


def plan_prefill(
    prompt_ids: Sequence[int],
    beginning: CachedPrefix,
    importance: torch.Tensor | None,
    prunes: bool,
    recalling: SessionConfig | None,
    config: PrefillConfig,
    protected: Sequence[Span],
    pieces: Sequence[str] | None = None,
) -> PrefillPlan:
    """The target's part of a prompt. Recalled text goes back to its place, and what is behind it is prefilled again.

    importance: (num_prompt_tokens,), for pruning and recall; None for a scorer without it. prunes: the text after the
    beginning is pruned. recalling: None recalls nothing. protected: half-open spans that are never dropped. pieces: the
    text of every token; None has chunks in place of lines.
    """
    start = beginning.num_tokens
    inputs = ScoringInputs(prompt_ids, None, protected, pieces, importance)
    recalled: list[int] = []
    if recalling is not None:
        dropped = dropped_positions(beginning.positions, start)
        recalled = recall_dropped(inputs, dropped, start, config, recalling)
    held = beginning.positions
    turn = select_turn(inputs, held, start, recalled, config if prunes else None, protected, place="in_text")
    positions = (*held[: turn.num_held], *turn.positions)
    token_ids = tuple(prompt_ids[position] for position in positions)
    return PrefillPlan(token_ids, positions, len(prompt_ids), start, len(recalled))


class _Turn:
    """One placed prompt, and its reply once that has ended."""

    def __init__(self, prompt_ids: Ints, positions: tuple[int, ...], request: RunningRequest) -> None:
        self.token_ids, self.positions, self.num_prompt_tokens = prompt_ids, positions, len(prompt_ids)
        # Weak until the reply begins: SGLang drops a request that was aborted while it waited. A started one will end,
        # and SGLang may release it in that very round.
        self._waiting: weakref.ref[RunningRequest] | None = weakref.ref(request)
        self._replying: RunningRequest | None = None

    def take_in_reply(self) -> None:
        """Add the reply of an ended request; of a released one there is none."""
        request = self._replying
        if request is None and self._waiting is not None:
            request = self._waiting()
        if request is None:
            self.end()
            return
        if not request.finished():
            self._replying = request if request.output_ids else None
            return
        # A step may have gone on past the end, and the last token may have no KV.
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


class TurnStore:
    """Turns with dropped or recalled text, of most_tokens in all, by tenant; the oldest are forgotten first."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._turns: OrderedDict[int, tuple[Hashable, _Turn]] = OrderedDict()
        self._answering: list[_Turn] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(
        self, namespace: Hashable, prompt_ids: Sequence[int], positions: tuple[int, ...], request: RunningRequest
    ) -> None:
        """Remember a turn; its reply is added when the request has ended."""
        turn = _Turn(np.asarray(prompt_ids, dtype=np.int64), positions, request)
        self._turns[self._next] = namespace, turn
        self._answering.append(turn)
        self._next += 1
        num_tokens = sum(len(kept.token_ids) for _, kept in self._turns.values())
        while num_tokens > self._most_tokens and len(self._turns) > 1:
            _, (_, oldest) = self._turns.popitem(last=False)
            num_tokens -= len(oldest.token_ids)
            oldest.end()

    def take_in_replies(self) -> None:
        """Called once per round of the scheduler, since requests are released at their end."""
        for turn in self._answering:
            turn.take_in_reply()
        self._answering = [turn for turn in self._answering if not turn.has_ended]

    def clear(self) -> None:
        self._turns.clear()
        self._answering.clear()

    def find(self, namespace: Hashable, prompt_ids: Sequence[int]) -> CachedPrefix:
        """The longest common prefix with a turn whose whole prompt it covers; of equal ones the newest.

        A turn's selection depends on its whole prompt, question included, so only a continuation inherits it. Slots
        written after the first token that differs have attended to it, so they do not belong to the prefix.
        """
        # A prompt's last token is new.
        ids = np.asarray(prompt_ids[:-1], dtype=np.int64)
        best: tuple[int, int, _Turn] | None = None
        for number, (owner, turn) in self._turns.items():
            length = num_common(turn.token_ids, ids) if owner == namespace else 0
            if length >= turn.num_prompt_tokens and (best is None or length >= best[0]):
                best = length, number, turn
        if best is None:
            return CachedPrefix()
        length, number, turn = best
        self._turns.move_to_end(number)
        return CachedPrefix(length, tuple(takewhile(lambda position: position < length, turn.positions)))


def num_common(first: Ints, second: Ints) -> int:
    """Length of the longest common prefix."""
    length, at, size = min(len(first), len(second)), 0, 64
    # Most texts differ soon, and many are compared with each new one.
    while at < length:
        stop = min(at + size, length)
        differs = np.flatnonzero(first[at:stop] != second[at:stop])
        if len(differs):
            return at + int(differs[0])
        at, size = stop, 4 * size
    return length
