"""Which slots of the draft's own KV hold which positions of a request's text. No SGLang and no tensors.

Every row of SGLang's request pool has as many slots of the draft's as every other, for itself alone: nothing is leased
or shared, so nothing is lost when a request ends, however it ends. A text of up to `draft_slots` tokens is held whole.
Of a longer one the draft holds what `choose_slots` says, chosen anew as the answer grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_slots import MOST_RESTORED, RENEW_EVERY, RENEW_WHERE_WRONG, choose_slots

Ints = npt.NDArray[np.int64]
# Steps whose tokens a row may have to take before the host can choose anew: the one that passes the mark, two whose
# results are on their way, and the one that is drafted. One more is spare.
_STEPS_AHEAD = 5


@dataclass(frozen=True)
class Part:
    """Tokens of a text that the draft is to take in at once, behind the first num_before slots of its row."""

    positions: Ints
    num_before: int


class DraftRow:
    """The slots of one request.

    Parameters
    ----------
    slots
        All of the row's slots, `num_row_slots` of them, in any order.
    config
        Says how many are chosen, and of what.

    Attributes
    ----------
    slots
        In the order in which the draft reads them: those that hold something, then free ones, which take what comes.
    shift
        Where in the text a token of its newest part stands, less its place in the row.
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
        """Hold chosen positions of a prompt, and the token after it, whose number the host need not know."""
        num_tokens = len(text_ids)
        positions = np.arange(num_tokens) if num_tokens <= self._config.draft_slots else self._choose(text_ids)
        self._held = np.append(positions, num_tokens)
        self._num_known = num_tokens + 1
        return Part(np.append(positions, num_tokens), 0)

    def is_due(self, num_tokens: int, is_wrong: bool) -> bool:
        """Return whether a text of so many tokens, as far as the host knows it, is to be chosen from anew: soon where
        the draft is wrong."""
        num_written = num_tokens - self._num_known
        pace = RENEW_WHERE_WRONG if is_wrong else RENEW_EVERY
        return self._num_known > 0 and num_written >= pace and num_tokens >= self._config.draft_slots

    def renew(self, text_ids: Ints) -> Part:
        """Choose the slots anew and free the others. What comes back, which may be nothing.

        The tokens that the host does not know yet stay behind, in the order in which they were written.
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
    """Slots of a row: what a text may hold, and what is written until they are chosen anew."""
    return config.draft_slots + RENEW_EVERY + _STEPS_AHEAD * (max_gamma + 1)


def text_of(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Ints:
    """Prompt and answer, as far as the host knows them."""
    return np.append(np.asarray(prompt_ids, dtype=np.int64), np.asarray(output_ids, dtype=np.int64))
