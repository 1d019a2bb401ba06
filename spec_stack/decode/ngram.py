"""Proposals by n-gram lookup, alone or with the draft: the continuation of an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.ngram import NgramProposal
from spec_stack.decode.propose import ModelProposer
from spec_stack.decode.proposer import Proposer, ProposerInputs, StepPolicy
from spec_stack.types import Proposal


class NgramProposer:
    """N-gram lookup alone; the draft is never used, and the policy of lookups bounds the continuation."""

    def __init__(self, means: ProposerInputs) -> None:
        self._end_ids, self._policy, self._index = means.end_ids, means.ngram_policy, means.index

    def propose(self, committed_ids: Sequence[int], guide: StepPolicy) -> Proposal:
        return _as_proposal(self._find(committed_ids, guide))

    def observe(self, record: StepRecord) -> None:
        self._policy.observe(record)

    def _find(self, committed_ids: Sequence[int], guide: StepPolicy) -> NgramProposal:
        """The best continuation of the text so far."""
        with guide.clock.measure("controller"):
            # A whole prompt takes a while: none of it is the draft's reading.
            self._index.read(committed_ids)
        most = min(guide.context.max_gamma, MAX_LOOKED_UP)
        return self._policy.offer(self._index.continuations((), self._end_ids), most)


class NgramThenDraft(NgramProposer):
    """Use the n-gram proposal where it is worth more than the draft's recent gain; else draft, and append one.

    The draft is fed n-gram tokens when it next drafts. It never drafts behind them: a whole forward costs far more than
    one more token to verify.
    """

    def __init__(self, means: ProposerInputs) -> None:
        super().__init__(means)
        self._model = ModelProposer(means)

    def propose(self, committed_ids: Sequence[int], guide: StepPolicy) -> Proposal:
        found = self._find(committed_ids, guide)
        if self._policy.prefers_ngram(found):
            return _as_proposal(found)
        room = guide.context.max_gamma

        def keep_drafting(signals: DraftSignals, token_ids: Sequence[int]) -> bool:
            return guide.keep_drafting(signals) and not self._takes_over(token_ids, room, guide.chances(signals))

        drafted = self._model.propose(committed_ids, guide, keep_drafting)
        return self._with_tail(drafted, guide, room) if drafted.token_ids else _as_proposal(found)

    def _takes_over(self, drafted_ids: Sequence[int], room: int, chances: tuple[float, float]) -> bool:
        """Return whether n-gram lookup gets the rest of a step."""
        continuations = self._index.continuations(drafted_ids, self._end_ids)
        num_drafted = len(drafted_ids)
        return self._policy.switches_to_ngram(
            continuations, min(room - num_drafted, MAX_LOOKED_UP), *chances, num_drafted
        )

    def _with_tail(self, drafted: Proposal, guide: StepPolicy, room: int) -> Proposal:
        """The drafted tokens with n-gram tokens behind them."""
        if drafted.token_ids[-1] in self._end_ids:
            return drafted
        num_drafted = len(drafted.token_ids)
        continuations = self._index.continuations(drafted.token_ids, self._end_ids)
        chance = guide.chances(drafted.signals)[0]
        tail = self._policy.tail(continuations, min(room - num_drafted, MAX_LOOKED_UP), chance, num_drafted)
        return _joined(drafted, tail) if tail.found else drafted


PROPOSERS: Mapping[str, Callable[[ProposerInputs], Proposer]] = {
    "model": ModelProposer,
    "ngram": NgramProposer,
    "both": NgramThenDraft,
}


def _as_proposal(found: NgramProposal) -> Proposal:
    return Proposal(found.token_ids, num_ngram_tokens=len(found.found))


def _joined(drafted: Proposal, tail: NgramProposal) -> Proposal:
    """Both as one proposal; the n-gram tokens' rows are one-hot."""
    token_ids, probs = tail.token_ids, drafted.draft_probs
    if probs is not None:
        rows = F.one_hot(torch.tensor(token_ids, device=probs.device), probs.shape[1]).to(probs.dtype)
        probs = torch.cat([probs, rows])
    return Proposal([*drafted.token_ids, *token_ids], probs, drafted.signals, len(token_ids))
