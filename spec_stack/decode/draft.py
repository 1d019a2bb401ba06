"""The draft's part of a step: read what it has not seen, then propose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from spec_stack.decode.sampler import Sampler
from spec_stack.records import DraftSignals
from spec_stack.types import Proposal

_BITS_PER_NAT = 1.4426950408889634


class DraftingModel(Protocol):
    """What proposing needs of the draft: `backends.cached_model.CachedModel`."""

    @property
    def next_position(self) -> int: ...
    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor: ...


def entropy_and_confidence(logits: torch.Tensor) -> tuple[float, float, int]:
    """Entropy in bits, largest probability and argmax of one unwarped row of logits (vocab,)."""
    log_probs = logits.float().log_softmax(dim=-1)
    top, token = log_probs.max(dim=-1)
    probs = log_probs.exp()
    # nan_to_num: a probability of exactly 0 has log-probability -inf.
    entropy = -(probs * log_probs).nan_to_num_(0.0).sum()
    entropy_nats, log_confidence, token_id = torch.stack((entropy.double(), top.double(), token.double())).tolist()
    return entropy_nats * _BITS_PER_NAT, 2.0 ** (log_confidence * _BITS_PER_NAT), int(token_id)


def propose(
    draft: DraftingModel,
    committed_ids: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    end_ids: Collection[int],
    keep_drafting: Callable[[DraftSignals], bool] = lambda _: True,
) -> Proposal:
    """Draft up to max_tokens tokens after committed_ids.

    The draft is first fed the committed tokens it has not seen, however many: none of them is a special case.
    Drafting ends early after a token of end_ids, or when keep_drafting says so. The last drafted token is not
    fed. With max_tokens 0 the draft is not touched.
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
