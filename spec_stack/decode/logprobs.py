"""Log-probabilities of the tokens of a step, from the target's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_stack.decode.sampler import Sampler
from spec_stack.types import TokenLogprobs, Verification


def step_logprobs(
    target_logits: torch.Tensor, verification: Verification, sampler: Sampler, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of a step's accepted tokens and the next one, before and after processors and warps.

    target_logits: (gamma + 1, vocab); the first len(token_ids) rows predict the tokens. num_top: likeliest tokens given
    beside each. Nothing is drawn from the sampler.
    """
    num_tokens = len(token_ids)
    raw_rows = target_logits[:num_tokens].float()
    shaped_rows = raw_rows if verification.rows is None else verification.rows
    raw = raw_rows.log_softmax(-1)
    warped = sampler.warp(shaped_rows).log_softmax(-1)
    tokens = torch.tensor(list(token_ids), device=raw.device)[:, None]
    chosen = torch.cat([raw.gather(1, tokens), warped.gather(1, tokens)], dim=1).tolist()
    tops = [_top(rows, num_top) for rows in (raw, warped)]
    rows = zip(token_ids, chosen, *tops, strict=True)
    return [TokenLogprobs(token_id, raw_of, warped_of, *top) for token_id, (raw_of, warped_of), *top in rows]


def _top(rows: torch.Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    values, ids = rows.topk(min(num_top, rows.shape[-1]), dim=-1)
    # A token that the warp excludes is no candidate.
    return [
        [(token_id, value) for token_id, value in zip(*row, strict=True) if value > -torch.inf]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
