"""Index of the draft's own slots per row of SGLang's request pool. No SGLang and no tensors.

Rows have equally many slots and share none, so a request's end needs no clean-up. See `choose_slots` for long texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_slots import MOST_RESTORED, RENEW_EVERY, RENEW_WHERE_WRONG, choose_slots

Ints = npt.NDArray[np.int64]
# Steps of tokens that a row must hold before slots can be chosen anew: the one that passes the mark, two with pending
# results, and the one that is drafted. One more is spare.
_STEPS_AHEAD = 5


@dataclass(frozen=True)
class Part:
    """Tokens of a text that the draft takes in at once, behind the first num_before slots of its row."""

    positions: Ints
    num_before: int


class DraftRow:
    """The slots of one request.

    slots: all `num_row_slots` slots of the row, in the order in which the draft reads them, free ones last. config: how
    many are chosen, and of what. shift: text position of a token of the newest part, less its place in the row.
    """

    def __init__(self, slots: Ints, config: PrefillConfig) -> None:
        self.slots, self._config = slots, config
        self._held: Ints = slots[:0]
        # Tokens before this one are in `_held`, or dropped; it and the ones after it follow in the row.
        self._num_known = 0

    @property
    def num_held(self) -> int:
        """Slots in use when they were chosen last, or the text began."""
        return len(self._held)

    @property
    def shift(self) -> int:
        return self._num_known - len(self._held)

    def begin(self, text_ids: Ints) -> Part:
        """Hold chosen positions of a prompt, and the token after it, whose id the host need not know."""
        num_tokens = len(text_ids)
        positions = np.arange(num_tokens) if num_tokens <= self._config.draft_slots else self._choose(text_ids)
        self._held = np.append(positions, num_tokens)
        self._num_known = num_tokens + 1
        return Part(np.append(positions, num_tokens), 0)

    def is_due(self, num_tokens: int, is_wrong: bool) -> bool:
        """Return whether slots are to be chosen anew at this known text length; sooner after wrong proposals."""
        num_written = num_tokens - self._num_known
        pace = RENEW_WHERE_WRONG if is_wrong else RENEW_EVERY
        return self._num_known > 0 and num_written >= pace and num_tokens >= self._config.draft_slots

    def renew(self, text_ids: Ints) -> Part:
        """Choose the slots anew and free the others; the recalled part, which may be empty.

        Tokens that the host does not know yet stay behind it, in write order.
        """
        held = np.append(self._held, np.arange(self._num_known, len(text_ids)))
        chosen = self._choose(text_ids)
        restored = np.setdiff1d(chosen, held)[:MOST_RESTORED]
        stays = np.isin(held, chosen)
        used, rest = self.slots[: len(held)], self.slots[len(held) :]
        free = np.append(rest, used[~stays])
        num_left = len(free) - len(restored)
        self.slots = np.concatenate([used[stays], free[num_left:], free[:num_left]])
        self._held = np.append(held[stays], restored)
        self._num_known = len(text_ids)
        return Part(restored, int(stays.sum()))

    def _choose(self, text_ids: Ints) -> Ints:
        config = self._config
        return np.array(
            choose_slots(text_ids, config.draft_slots, config.chunk_size, config.keep_first * config.chunk_size)
        )


def num_row_slots(config: PrefillConfig, max_gamma: int) -> int:
    """Slots of a row: the chosen ones, and room for what is written until the next choice."""
    return config.draft_slots + RENEW_EVERY + _STEPS_AHEAD * (max_gamma + 1)


def text_of(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Ints:
    """Prompt and output, as far as the host knows them."""
    return np.append(np.asarray(prompt_ids, dtype=np.int64), np.asarray(output_ids, dtype=np.int64))
