"""The kept tokens of a prompt that continues an earlier one: its selection, recalled text. No SGLang import.

As a session's `prefill.recall`, for conversations identified by their token prefix; KV stays with the radix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.recall import dropped_positions, recall_dropped, select_turn
from spec_stack.prefill.rule import ScoringInputs

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


def select_kept(
    prompt_ids: Sequence[int],
    beginning: CachedPrefix,
    importance: torch.Tensor | None,
    prunes: bool,
    recalling: SessionConfig | None,
    config: PrefillConfig,
    protected: Sequence[Span],
    pieces: Sequence[str] | None = None,
) -> tuple[tuple[int, ...], int]:
    """The kept positions of a prompt, in order, and how many of them are recalled.

    What stands behind the first recalled token is prefilled again. importance: (num_prompt_tokens,), for pruning and
    recall; None for a scorer without it. prunes: the text after the beginning is pruned. recalling: None recalls
    nothing. protected: half-open spans that are never dropped. pieces: the text of every token; None has chunks in
    place of lines.
    """
    start, held = beginning.num_tokens, beginning.positions
    inputs = ScoringInputs(prompt_ids, None, protected, pieces, importance)
    recalled: list[int] = []
    if recalling is not None:
        recalled = recall_dropped(inputs, dropped_positions(held, start), start, config, recalling)
    turn = select_turn(inputs, held, start, recalled, config if prunes else None, protected, place="in_text")
    return (*held[: turn.num_held], *turn.positions), len(recalled)


@dataclass(frozen=True)
class _Turn:
    """A pruned prompt. reply: SGLang's own array of the output tokens, which grows while the request runs."""

    tenant: Hashable
    token_ids: Ints
    positions: tuple[int, ...]
    reply: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.reply)

    def num_continued(self, tenant: Hashable, ids: Ints) -> int:
        """Tokens of the prompt and its reply that a text begins with; 0 unless it has the whole prompt.

        A selection depends on its whole prompt, question included, so only a continuation inherits it. The reply's
        last token may have no KV.
        """
        if tenant != self.tenant or num_common(self.token_ids, ids) < len(self.token_ids):
            return 0
        # A copy: an array that is looked into cannot grow.
        reply = np.array(self.reply[: len(ids)], dtype=np.int64)
        return len(self.token_ids) + max(0, num_common(reply, ids[len(self.token_ids) :]) - 1)


class TurnStore:
    """Pruned turns, of most_tokens tokens in all, by tenant; the oldest are forgotten first."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._turns: OrderedDict[int, _Turn] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, tenant: Hashable, prompt_ids: Sequence[int], positions: Sequence[int], reply: Sequence[int]) -> None:
        """Remember a turn; `reply` is not copied."""
        self._turns[self._next] = _Turn(tenant, np.asarray(prompt_ids, dtype=np.int64), tuple(positions), reply)
        self._next += 1
        num_tokens = sum(map(len, self._turns.values()))
        while num_tokens > self._most_tokens and len(self._turns) > 1:
            _, oldest = self._turns.popitem(last=False)
            num_tokens -= len(oldest)

    def clear(self) -> None:
        self._turns.clear()

    def find(self, tenant: Hashable, prompt_ids: Sequence[int]) -> CachedPrefix:
        """The longest prefix of a prompt that a turn had; of equal ones the newest turn's."""
        # A prompt's last token is new.
        ids = np.asarray(prompt_ids[:-1], dtype=np.int64)
        lengths = {number: turn.num_continued(tenant, ids) for number, turn in self._turns.items()}
        best = max(lengths, key=lambda number: (lengths[number], number), default=None)
        if best is None or not lengths[best]:
            return CachedPrefix()
        self._turns.move_to_end(best)
        turn = self._turns[best]
        return CachedPrefix(lengths[best], (*turn.positions, *range(len(turn.token_ids), lengths[best])))


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
