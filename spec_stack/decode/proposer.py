"""Proposals of a request: from the draft under the policy, by n-gram lookup, or from the better of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F

from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord, chosen_gamma
from spec_stack.controller.ngram import NgramPolicy, NgramProposal
from spec_stack.decode.clock import Clock
from spec_stack.decode.ngram_index import NgramIndex
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import StopChecker
from spec_stack.settings.warning import warn_caller
from spec_stack.types import DraftingModel, Proposal, SteppableModel

_BITS_PER_NAT = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """What decoding needs of a request.

    prompt_ids: the whole prompt. end_ids: tokens that end the text. proposer: "model", "ngram" or "both". request_id,
    precision, task: labels of the records. num_logprobs: likeliest tokens given beside each token's log-probability;
    None gives neither. clock: its phase "scoring" goes into the first record.
    """

    prompt_ids: list[int]
    sampler: Sampler
    stopper: StopChecker
    end_ids: Collection[int]
    proposer: str
    precision: str
    request_id: str = ""
    task: str = ""
    num_logprobs: int | None = None
    clock: Clock = field(default_factory=Clock)


class Proposer:
    """Proposes a request's tokens for verification, step by step.

    "model" drafts up to the policy's gamma. "ngram" looks up alone, and never uses the draft. "both" takes the n-gram
    proposal where it is worth more than the draft's recent gain; else it drafts, and appends n-gram tokens. The draft
    is fed them when it next drafts. It never drafts behind them: a whole forward costs far more than one more token to
    verify.

    A proposed token, and whether there is one, may depend only on the tokens before it: a proposal that is cut by what
    was drawn after the cut biases the output.

    draft: its cache is advanced. ngram_policy: decides when n-gram lookup pays. index: the text so far, for it.
    """

    def __init__(
        self, request: DecodeRequest, draft: DraftingModel, ngram_policy: NgramPolicy, index: NgramIndex | None = None
    ) -> None:
        self.draft = draft
        self._source, self._sampler, self._end_ids = request.proposer, request.sampler, request.end_ids
        self._clock = request.clock
        self.ngram_policy = ngram_policy
        self._index = NgramIndex() if index is None else index
        self._has_begun = self._is_broken = False

    def propose(self, committed_ids: Sequence[int], policy: Policy, context: StepContext) -> Proposal:
        """The tokens to verify in a step. committed_ids: the whole prompt and the output so far."""
        if self._source == "model":
            return self._drafted(committed_ids, policy, context)
        with self._clock.measure("controller"):
            # A whole prompt takes a while: none of it is the draft's reading.
            if self._has_begun:
                self._index.extend(committed_ids[len(self._index) :])
            else:
                # A session's index holds the text of its last turn.
                self._index.begin(committed_ids)
                self._has_begun = True
        found = self.ngram_policy.offer(self._index.continuations((), self._end_ids), context.max_gamma)
        if self._source == "ngram" or self.ngram_policy.prefers_ngram(found):
            return _as_proposal(found)
        drafted = self._drafted(committed_ids, policy, context)
        return self._with_tail(drafted, context.max_gamma) if drafted.token_ids else _as_proposal(found)

    def observe(self, record: StepRecord) -> None:
        """Learn from the step's record."""
        if self._source != "model":
            self.ngram_policy.observe(record)

    def _drafted(self, committed_ids: Sequence[int], policy: Policy, context: StepContext) -> Proposal:
        """The draft's tokens. A draft whose logits become non-finite is dropped for the rest of the request, with a
        warning.
        """
        if self._is_broken:
            return Proposal()

        def keep_drafting(signals: DraftSignals) -> bool:
            with self._clock.measure("controller"):
                return policy.keep_drafting(context, signals)

        with self._clock.measure("controller"):
            gamma = chosen_gamma(policy, context)
        proposal = propose(self.draft, committed_ids, gamma, self._sampler, self._end_ids, keep_drafting)
        if not proposal.is_finite:
            self._is_broken = True
            warn_caller(
                "the draft's logits are not finite; it proposes nothing for the rest of such requests (this is said "
                "once; check the draft in a wider precision)"
            )
        return proposal

    def _with_tail(self, drafted: Proposal, most: int) -> Proposal:
        """The drafted tokens with n-gram tokens behind them, whose rows are one-hot."""
        num_drafted, probs = len(drafted.token_ids), drafted.draft_probs
        if drafted.token_ids[-1] in self._end_ids:
            return drafted
        # Of all drafted tokens to be right.
        chance = prod(drafted.signals.confidence)
        continuations = self._index.continuations(drafted.token_ids, self._end_ids)
        token_ids = self.ngram_policy.tail(continuations, most - num_drafted, chance, num_drafted).token_ids
        if probs is not None and token_ids:
            rows = F.one_hot(torch.tensor(token_ids, device=probs.device), probs.shape[1]).to(probs.dtype)
            probs = torch.cat([probs, rows])
        return Proposal([*drafted.token_ids, *token_ids], probs, drafted.signals, len(token_ids))


def entropy_and_confidence(logits: torch.Tensor) -> tuple[float, float, int]:
    """Entropy in bits, largest probability and argmax of one unwarped row of logits (vocab,), in one read-back."""
    probs = logits.float().softmax(dim=-1)
    confidence, token_id = probs.max(dim=-1)
    # An id survives fp32 exactly: vocabularies are smaller than 2**24.
    statistics = torch.stack([torch.special.entr(probs).sum(), confidence, token_id.to(probs.dtype)])
    entropy, best, best_id = statistics.tolist()
    return entropy * _BITS_PER_NAT, best, int(best_id)


def propose(
    draft: SteppableModel,
    committed_ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    end_ids: Collection[int],
    keep_drafting: Callable[[DraftSignals], bool] = lambda signals: True,
) -> Proposal:
    """Draft at most max_tokens tokens after the committed ones (prompt and output).

    The draft is first fed all unread committed tokens; the last drafted token is not fed. With max_tokens 0 the draft's
    cache is not touched. keep_drafting gets the signals so far; False ends the proposal, as do end_ids.

    The proposal's draft_probs are (gamma, vocab) where tokens were drawn. The proposal ends before a token whose logits
    are not finite: a draw from them fails.
    """
    token_ids: list[int] = []
    rows: list[torch.Tensor] = []
    signals, is_finite = DraftSignals(), True
    shaper = sampler.shaper.fork_for_draft() if sampler.shaper is not None and max_tokens else None
    prefix_ids = list(committed_ids) if shaper is not None else []
    unseen = list(committed_ids[draft.next_position :])
    while len(token_ids) < max_tokens:
        start = draft.next_position
        raw = draft.forward(unseen, range(start, start + len(unseen)), num_logits=1)[0]
        logits = raw if shaper is None else shaper(prefix_ids, raw)
        entropy, confidence, token_id = entropy_and_confidence(logits)
        if not math.isfinite(entropy + confidence):
            # A shaper that forbids all of the draft's candidates is no fault of the draft.
            is_finite = shaper is not None and math.isfinite(float(raw.max()))
            break
        signals.append(entropy, confidence)
        if not sampler.is_greedy:
            token_id, probs = sampler.draw(logits)
            rows.append(probs)
        token_ids.append(token_id)
        prefix_ids.append(token_id)
        unseen = [token_id]
        if token_id in end_ids or len(token_ids) == max_tokens or not keep_drafting(signals):
            break
    return Proposal(token_ids, torch.stack(rows) if rows else None, signals, is_finite=is_finite)


def _as_proposal(found: NgramProposal) -> Proposal:
    return Proposal(found.token_ids, num_ngram_tokens=len(found.found))
