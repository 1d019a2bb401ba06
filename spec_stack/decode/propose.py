"""The draft's part of a step: feed it the unread tokens, then propose."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.decode.proposer import ProposerInputs, StepPolicy
from spec_stack.decode.sampler import Sampler
from spec_stack.settings.warning import warn_caller
from spec_stack.types import Proposal, SteppableModel

KeepDrafting = Callable[[DraftSignals, Sequence[int]], bool]

_BITS_PER_NAT = 1.4426950408889634


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
    keep_drafting: KeepDrafting = lambda signals, token_ids: True,
) -> Proposal:
    """Draft at most max_tokens tokens after the committed ones (prompt and output).

    The draft is first fed all unread committed tokens; the last drafted token is not fed. With max_tokens 0 the draft's
    cache is not touched. keep_drafting gets the signals and tokens so far; False ends the proposal, as do end_ids.

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
        if token_id in end_ids or len(token_ids) == max_tokens or not keep_drafting(signals, token_ids):
            break
    return Proposal(token_ids, torch.stack(rows) if rows else None, signals, is_finite=is_finite)


class ModelProposer:
    """The draft model under the policy."""

    def __init__(self, means: ProposerInputs) -> None:
        self._means = means
        self._is_broken = False

    def propose(
        self, committed_ids: Sequence[int], guide: StepPolicy, keep_drafting: KeepDrafting | None = None
    ) -> Proposal:
        """Draft up to the policy's gamma; keep_drafting, where given, replaces the policy's.

        A draft whose logits become non-finite is dropped for the rest of the request, with a warning.
        """
        if self._is_broken:
            return Proposal()

        def ask(signals: DraftSignals, token_ids: Sequence[int]) -> bool:
            return guide.keep_drafting(signals)

        gamma = guide.choose()
        means = self._means
        asked = keep_drafting or ask
        proposal = propose(means.draft, committed_ids, gamma, means.sampler, means.end_ids, asked)
        if not proposal.is_finite:
            self._is_broken = True
            warn_caller(
                "the draft's logits are not finite; it proposes nothing for the rest of such requests (this is said "
                "once; check the draft in a wider precision)"
            )
        return proposal

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn: the policy does."""
