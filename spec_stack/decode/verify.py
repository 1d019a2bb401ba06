"""The acceptance test. Pure: logits and a proposal in, a verification out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from spec_stack.decode.sampler import Sampler, Shaper
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
    return accept(target_probs, draft_probs, proposal.token_ids, sampler)


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
    return Verification(num_accepted, correct(target_probs[num_accepted], draft_probs[num_accepted], sampler))


def correct(target_probs: torch.Tensor, draft_probs: torch.Tensor, sampler: Sampler) -> int:
    """The token in the place of a rejected one, from the distributions (vocab,) of both."""
    residual = (target_probs - draft_probs).clamp_(min=0)
    # Equal distributions leave no residual; rounding alone can bring a rejection there.
    return sampler.pick(residual if bool(residual.sum() > 0) else target_probs)


def verify_in_order(
    target_logits: torch.Tensor,
    proposal: Proposal,
    sampler: Sampler,
    shaper: Shaper,
    committed_ids: Sequence[int],
    end_ids: Collection[int],
) -> Verification:
    """`verify` where the rows depend on the tokens before them, row by row.

    A row is shaped only once all tokens before it stand. So the shaper is asked about every prefix once, in order and
    never about one that is rejected: exactly as in plain generation, whatever state it keeps. An accepted end token is
    given as the next token, for plain generation asks nothing after it.
    """
    prefix_ids, rows = list(committed_ids), []
    for index, token_id in enumerate([*proposal.token_ids, None]):
        row = shaper(prefix_ids, target_logits[index])
        if not bool(row.max() > -torch.inf):
            raise ValueError("the logits processors allow no token here; loosen them, or the grammar they keep to")
        rows.append(row)
        choice = _judge(row, index, token_id, proposal.draft_probs, sampler)
        if choice != token_id or token_id in end_ids:
            return Verification(index, choice, torch.stack(rows))
        prefix_ids.append(choice)
    raise RuntimeError("a verification ended without a next token")


def _judge(
    row: torch.Tensor, index: int, token_id: int | None, draft_probs: torch.Tensor | None, sampler: Sampler
) -> int:
    """A drafted token where it stands, else the one in its place; after the last drafted one (None) a draw."""
    if sampler.is_greedy:
        return int(row.argmax())
    target_probs = sampler.probs(row[None])[0]
    if token_id is None:
        return sampler.pick(target_probs)
    if draft_probs is None:
        draft_row = torch.zeros_like(target_probs)
        draft_row[token_id] = 1.0
    else:
        draft_row = draft_probs[index]
    if bool(sampler.uniform(1, row.device)[0] * draft_row[token_id] < target_probs[token_id]):
        return token_id
    return correct(target_probs, draft_row, sampler)


def verify(
    target_logits: torch.Tensor,
    proposal: Proposal,
    sampler: Sampler,
    committed_ids: Sequence[int] = (),
    end_ids: Collection[int] = (),
) -> Verification:
    """Which drafted tokens stand, and the target's own next token.

    Parameters
    ----------
    target_logits : torch.Tensor
        (gamma + 1, vocab): row i is the target's prediction of drafted token i, the last row the one after all of them.
    proposal : Proposal
        The drafted tokens, and what they were drawn from.
    sampler : Sampler
        Greedy: the prefix that equals the target's argmax is accepted. Else by rejection sampling.
    committed_ids, end_ids
        The tokens before the proposal, and those that end a text; only a shaper asks for them.
    """
    if sampler.shaper is not None:
        return verify_in_order(target_logits, proposal, sampler, sampler.shaper, committed_ids, end_ids)
    if sampler.is_greedy:
        return verify_greedy(target_logits, proposal.token_ids)
    return verify_sampled(target_logits, proposal, sampler)
