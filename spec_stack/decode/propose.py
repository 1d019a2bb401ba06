"""The draft's part of a step: feed it the unread tokens, then propose."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from spec_stack.controller.base import DraftSignals
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal, SteppableModel

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
