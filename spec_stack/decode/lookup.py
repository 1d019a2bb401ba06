"""Proposals that cost no model: the last tokens stood earlier in a text, and what followed them may follow again."""

from __future__ import annotations

from collections.abc import Sequence

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import StepRecord
from spec_stack.decode.proposer import Guide, Means
from spec_stack.types import Proposal


class LookupProposer:
    """Look-up alone: no step touches the draft. How much of a continuation is verified the gate says."""

    def __init__(self, means: Means) -> None:
        self._end_ids, self._gate, self._index = means.end_ids, means.gate, means.index

    def propose(self, committed_ids: Sequence[int], guide: Guide) -> Proposal:
        """The likeliest continuation, as far as verifying it pays."""
        with guide.clock.measure("controller"):
            self._index.read(committed_ids)
        most = min(guide.context.max_gamma, MAX_LOOKED_UP)
        offer = self._gate.offer(self._index.continuations((), self._end_ids), most)
        return Proposal(offer.token_ids, num_looked_up=len(offer.found), match_length=offer.match_length)

    def observe(self, record: StepRecord) -> None:
        self._gate.observe(record)
