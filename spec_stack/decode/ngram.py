"""Proposals without a model: the continuation of an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import StepRecord
from spec_stack.decode.proposer import Guide, Means
from spec_stack.types import Proposal


class LookupProposer:
    """Look-up alone; the draft is never used, and the gate bounds the continuation."""

    def __init__(self, means: Means) -> None:
        self._end_ids, self._gate, self._index = means.end_ids, means.gate, means.index

    def propose(self, committed_ids: Sequence[int], guide: Guide) -> Proposal:
        with guide.clock.measure("controller"):
            self._index.read(committed_ids)
        most = min(guide.context.max_gamma, MAX_LOOKED_UP)
        offer = self._gate.offer(self._index.continuations((), self._end_ids), most)
        return Proposal(offer.token_ids, num_looked_up=len(offer.found), match_length=offer.match_length)

    def observe(self, record: StepRecord) -> None:
        self._gate.observe(record)
