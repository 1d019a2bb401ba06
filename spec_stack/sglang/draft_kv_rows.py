"""The slots of a server's draft, by request, where it keeps a budget of each text. Loads no SGLang."""

from __future__ import annotations

import numpy as np

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_kv_budget import RENEW_EVERY, DraftKVBudget, Ints

# Steps of tokens that a row must hold before slots can be chosen anew: the one that passes the mark, two with pending
# results, and the one that is drafted. One more is spare.
_STEPS_AHEAD = 5


class DraftKVRow:
    """A server's slots of one request, in the order in which the draft reads them, free ones last.

    shift: text position of a token of the newest part, less its place in the row.
    """

    def __init__(self, slots: Ints, budget: DraftKVBudget) -> None:
        self.slots, self._budget = slots, budget
        # Positions of tokens before the budget's num_known; that one and the ones after it follow in the row.
        self._positions: Ints = slots[:0]

    @property
    def num_used(self) -> int:
        """Slots in use when they were chosen last, or the text began."""
        return len(self._positions)

    @property
    def shift(self) -> int:
        return self._budget.num_known - len(self._positions)

    def begin(self, text_ids: Ints) -> Ints:
        """Hold chosen positions of a prompt, and the token after it; their positions."""
        self._positions = np.append(self._budget.choose(text_ids), len(text_ids))
        self._budget.num_known += 1
        return self._positions

    def is_due(self, num_tokens: int, is_wrong: bool) -> bool:
        return bool(len(self._positions)) and self._budget.is_due(num_tokens, is_wrong)

    def renew(self, text_ids: Ints) -> Ints:
        """Choose the slots anew and free the others; the recalled positions, maybe none, which come last.

        Tokens that the host does not know yet stay behind them, in write order.
        """
        positions = np.append(self._positions, np.arange(self._budget.num_known, len(text_ids)))
        stays, recalled = self._budget.renew(text_ids, positions, len(text_ids))
        used, rest = self.slots[: len(positions)], self.slots[len(positions) :]
        free = np.append(rest, used[~stays])
        num_left = len(free) - len(recalled)
        self.slots = np.concatenate([used[stays], free[num_left:], free[:num_left]])
        self._positions = np.append(positions[stays], recalled)
        return recalled


def num_row_slots(config: PrefillConfig, max_gamma: int) -> int:
    """Slots of a request's draft: the chosen ones, and room for what is written until the next choice."""
    return config.draft_kv_budget + RENEW_EVERY + _STEPS_AHEAD * (max_gamma + 1)


def pool_slots(num_requests: int, num_per_request: int) -> int:
    """Slots of a draft's whole pool. One row is SGLang's padding."""
    return (num_requests + 1) * num_per_request
