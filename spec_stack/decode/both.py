"""Look-up and draft model in one request: each step uses the one with more expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.lookup import Offer
from spec_stack.decode.propose import ModelProposer
from spec_stack.decode.proposer import Guide, Means
from spec_stack.types import Proposal


class LookupThenModel:
    """Prefer a look-up where it is worth more than the draft's recent gain; else draft, and append a look-up.

    The draft is fed looked-up tokens when it next drafts. It never drafts behind a look-up: a whole forward costs far
    more than one more token to verify.
    """

    def __init__(self, means: Means) -> None:
        self._end_ids, self._gate = means.end_ids, means.gate
        self._model = ModelProposer(means)
        self._index = means.index

    def propose(self, committed_ids: Sequence[int], guide: Guide) -> Proposal:
        with guide.clock.measure("controller"):
            # A whole prompt takes a while: none of it is the draft's reading.
            self._index.read(committed_ids)
        room = guide.context.max_gamma
        offer = self._gate.offer(self._index.continuations((), self._end_ids), min(room, MAX_LOOKED_UP))
        if self._gate.prefers(offer):
            return Proposal(offer.token_ids, num_looked_up=len(offer.found), match_length=offer.match_length)

        def keep_drafting(signals: DraftSignals, token_ids: Sequence[int]) -> bool:
            return guide.keep_drafting(signals) and not self._takes_over(token_ids, room, guide.chances(signals))

        drafted = self._model.propose(committed_ids, guide, keep_drafting)
        if not drafted.token_ids and offer.found:
            return Proposal(offer.token_ids, num_looked_up=len(offer.found), match_length=offer.match_length)
        return self._with_tail(drafted, guide, room)

    def observe(self, record: StepRecord) -> None:
        self._gate.observe(record)

    def _takes_over(self, drafted_ids: Sequence[int], room: int, chances: tuple[float, float]) -> bool:
        """Return whether the look-up gets the rest of a step."""
        continuations = self._index.continuations(drafted_ids, self._end_ids)
        num_drafted = len(drafted_ids)
        return self._gate.takes_over(continuations, min(room - num_drafted, MAX_LOOKED_UP), *chances, num_drafted)

    def _with_tail(self, drafted: Proposal, guide: Guide, room: int) -> Proposal:
        """The drafted tokens with the look-up behind them."""
        if not drafted.token_ids or drafted.token_ids[-1] in self._end_ids:
            return drafted
        continuations = self._index.continuations(drafted.token_ids, self._end_ids)
        most = min(room - len(drafted.token_ids), MAX_LOOKED_UP)
        offer = self._gate.tail(continuations, most, guide.chances(drafted.signals)[0], len(drafted.token_ids))
        return _joined(drafted, offer) if offer.found else drafted


def _joined(drafted: Proposal, offer: Offer) -> Proposal:
    """Both as one proposal; the looked-up tokens' rows are one-hot."""
    tail, probs = offer.token_ids, drafted.draft_probs
    if probs is not None:
        rows = F.one_hot(torch.tensor(tail, device=probs.device), probs.shape[1]).to(probs.dtype)
        probs = torch.cat([probs, rows])
    return Proposal([*drafted.token_ids, *tail], probs, drafted.signals, len(tail), offer.match_length)
