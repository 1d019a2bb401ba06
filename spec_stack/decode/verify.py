"""The acceptance test. Pure: logits and a proposal in, a verification out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from spec_stack.decode.sampler import LogitsProcessors, Sampler
from spec_stack.types import Proposal, Verification


def verify_greedy(target_logits: torch.Tensor, token_ids: list[int]) -> Verification:
    """Accept the prefix that equals the target's argmax. target_logits (len(token_ids) + 1, vocab)."""
    choices: list[int] = target_logits.argmax(dim=-1).tolist()
    num_accepted = 0
    while num_accepted < len(token_ids) and choices[num_accepted] == token_ids[num_accepted]:
        num_accepted += 1
    return Verification(num_accepted, choices[num_accepted])


def verify_sampled(target_logits: torch.Tensor, proposal: Proposal, sampler: Sampler) -> Verification:
    """Verify drafted tokens by rejection sampling, from target_logits (gamma + 1, vocab).

    A token is accepted with probability min(1, target / draft), both warped; chosen, undrawn tokens have draft
    probability 1. The first rejected one is replaced by a draw from max(target - draft, 0). After full acceptance the
    bonus token comes from the target. The result has exactly the target's distribution (Leviathan et al., 2023,
    https://arxiv.org/abs/2211.17192).
    """
    target_probs, draft_probs = sampler.probs(target_logits), proposal.draft_probs
    num_drafted = len(proposal.token_ids)
    if num_drafted == 0:
        return Verification(0, sampler.pick(target_probs[0]))
    tokens = torch.tensor(proposal.token_ids, device=target_probs.device)[:, None]
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(1, tokens, 1.0)
    target_p = target_probs[:num_drafted].gather(1, tokens)[:, 0]
    draft_p = draft_probs.gather(1, tokens)[:, 0]
    accepted = (sampler.uniform(num_drafted, target_probs.device) * draft_p < target_p).tolist()
    num_accepted = accepted.index(False) if False in accepted else num_drafted
    if num_accepted == num_drafted:
        return Verification(num_accepted, sampler.pick(target_probs[num_drafted]))
    return Verification(num_accepted, correct(target_probs[num_accepted], draft_probs[num_accepted], sampler))


def correct(target_probs: torch.Tensor, draft_probs: torch.Tensor, sampler: Sampler) -> int:
    """The replacement of a rejected token, from the distributions (vocab,) of both."""
    residual = (target_probs - draft_probs).clamp_(min=0)
    # Equal distributions leave no residual; rounding alone can bring a rejection there.
    return sampler.pick(residual if bool(residual.sum() > 0) else target_probs)


def verify_in_order(
    target_logits: torch.Tensor,
    proposal: Proposal,
    sampler: Sampler,
    shaper: LogitsProcessors,
    committed_ids: Sequence[int],
    end_ids: Collection[int],
) -> Verification:
    """`verify` row by row, where rows depend on the tokens before them.

    The shaper sees every committed prefix once, in order, and never a rejected one: exactly as in plain generation,
    whatever its state. An accepted end token becomes the next token, since plain generation stops there.
    """
    prefix_ids, rows = list(committed_ids), []
    for index, token_id in enumerate([*proposal.token_ids, None]):
        row = shaper(prefix_ids, target_logits[index])
        if not bool(row.max() > -torch.inf):
            if bool(row.isnan().any()):
                raise ValueError("a logits processor returned NaN here, or the model did; find which before going on")
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
    """The drafted token or its replacement; a plain draw after the last drafted one (None)."""
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
    """The accepted drafted tokens, and the target's own next token.

    target_logits: (gamma + 1, vocab); row i predicts drafted token i, the last row the token after all of them. Greedy:
    the prefix that equals the target's argmax; else rejection sampling. committed_ids and end_ids are for the shaper
    alone.
    """
    if sampler.shaper is not None:
        return verify_in_order(target_logits, proposal, sampler, sampler.shaper, committed_ids, end_ids)
    if sampler.is_greedy:
        return verify_greedy(target_logits, proposal.token_ids)
    return verify_sampled(target_logits, proposal, sampler)
