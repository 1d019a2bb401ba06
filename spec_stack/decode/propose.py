"""The draft's part of a step: catch up with what it has not seen, then propose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from spec_stack.controller.base import DraftSignals
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal, SteppableModel

_BITS_PER_NAT = 1.4426950408889634


def entropy_and_confidence(logits: torch.Tensor) -> tuple[float, float, int]:
    """Entropy in bits, largest probability and argmax of one unwarped row of logits (vocab,)."""
    probs = logits.float().softmax(dim=-1)
    confidence, token_id = probs.max(dim=-1)
    return float(torch.special.entr(probs).sum()) * _BITS_PER_NAT, float(confidence), int(token_id)


def propose(
    draft: SteppableModel,
    committed_ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    end_ids: Collection[int],
    keep_drafting: Callable[[DraftSignals], bool] = lambda _: True,
) -> Proposal:
    """Draft tokens after the committed ones.

    The draft is first fed the committed tokens it has not seen, however many: none of them is a special case. The last
    drafted token is not fed. The draft's cache is advanced; with max_tokens 0 it is not touched.

    Parameters
    ----------
    draft : SteppableModel
        The draft.
    committed_ids : sequence of int
        The prompt and what was generated, the whole of it.
    max_tokens : int
        Most tokens to draft.
    sampler : Sampler
        Draws them, or takes the likeliest where it is greedy.
    end_ids : collection of int
        Tokens after which drafting ends.
    keep_drafting : callable
        Asked after every token with the signals so far; False ends the proposal.

    Returns
    -------
    Proposal
        The tokens, their signals and, where they were drawn, draft_probs (gamma, vocab).
    """
    token_ids: list[int] = []
    rows: list[torch.Tensor] = []
    signals = DraftSignals()
    unseen = committed_ids[draft.next_position :]
    while len(token_ids) < max_tokens:
        start = draft.next_position
        logits = draft.forward(unseen, range(start, start + len(unseen)), num_logits=1)[0]
        entropy, confidence, token_id = entropy_and_confidence(logits)
        signals.append(entropy, confidence)
        if not sampler.is_greedy:
            token_id, probs = sampler.draw(logits)
            rows.append(probs)
        token_ids.append(token_id)
        unseen = [token_id]
        if token_id in end_ids or len(token_ids) == max_tokens or not keep_drafting(signals):
            break
    return Proposal(token_ids, torch.stack(rows) if rows else None, signals)
