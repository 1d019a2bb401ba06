"""The acceptance test. Pure: logits and a proposal in, a verification out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal, Verification


def verify_greedy(target_logits: torch.Tensor, token_ids: list[int]) -> Verification:
    """Accept the prefix that equals the target's argmax. target_logits (len(token_ids) + 1, vocab)."""
    choices: list[int] = target_logits.argmax(dim=-1).tolist()
    num_accepted = 0
    while num_accepted < len(token_ids) and choices[num_accepted] == token_ids[num_accepted]:
        num_accepted += 1
    return Verification(num_accepted, choices[num_accepted])


def verify_sampled(target_logits: torch.Tensor, proposal: Proposal, sampler: Sampler) -> Verification:
    """`accept`, from logits (gamma + 1, vocab); tokens that were chosen, not drawn, have draft probability 1."""
    target_probs = sampler.probs(target_logits)
    if not proposal.token_ids:
        return Verification(0, sampler.pick(target_probs[0]))
    draft_probs = proposal.draft_probs
    if draft_probs is None:
        tokens = torch.tensor(proposal.token_ids, device=target_probs.device)[:, None]
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(1, tokens, 1.0)
    return (sampler.accept or accept)(target_probs, draft_probs, proposal.token_ids, sampler)


def accept(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_ids: Sequence[int], sampler: Sampler
) -> Verification:
    """Judge one or more drafted tokens by rejection sampling.

    A token is accepted with probability min(1, target / draft); the first rejected one is replaced by a draw from
    max(target - draft, 0). After full acceptance the bonus token comes from the target. So the result has exactly the
    target's distribution (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192).

    Parameters
    ----------
    target_probs : torch.Tensor
        (gamma + 1, vocab), warped, at the places of the drafted tokens and after the last.
    draft_probs : torch.Tensor
        (gamma, vocab), warped: what the tokens were drawn from.
    token_ids : sequence of int
        The drafted tokens.
    sampler : Sampler
        Its generator is advanced.
    """
    num_drafted = len(token_ids)
    tokens = torch.tensor(token_ids, device=target_probs.device)[:, None]
    target_p = target_probs[:num_drafted].gather(1, tokens)[:, 0]
    draft_p = draft_probs.gather(1, tokens)[:, 0]
    accepted = (sampler.uniform(num_drafted, target_probs.device) * draft_p < target_p).tolist()
    num_accepted = accepted.index(False) if False in accepted else num_drafted
    if num_accepted == num_drafted:
        return Verification(num_accepted, sampler.pick(target_probs[num_drafted]))
    residual = (target_probs[num_accepted] - draft_probs[num_accepted]).clamp_(min=0)
    # Equal distributions leave no residual; rounding alone can bring a rejection there.
    weights = residual if bool(residual.sum() > 0) else target_probs[num_accepted]
    return Verification(num_accepted, sampler.pick(weights))


def verify(target_logits: torch.Tensor, proposal: Proposal, sampler: Sampler) -> Verification:
    """Which drafted tokens stand, and the target's own next token.

    Parameters
    ----------
    target_logits : torch.Tensor
        (gamma + 1, vocab): row i is the target's prediction of drafted token i, the last row the one after all of them.
    proposal : Proposal
        The drafted tokens, and what they were drawn from.
    sampler : Sampler
        Greedy: the prefix that equals the target's argmax is accepted. Else by rejection sampling.
    """
    if sampler.is_greedy:
        return verify_greedy(target_logits, proposal.token_ids)
    return verify_sampled(target_logits, proposal, sampler)
