"""From votes on chunks to the prompt tokens the target prefills. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.chunks import SCORERS, Evidence
from spec_stack.types import Selection


def select_chunks(scores: torch.Tensor, config: PrefillConfig, keep_rate: float) -> list[int]:
    """Which chunks to keep.

    Parameters
    ----------
    scores
        (num_chunks,).
    config
        For keep_first and keep_last, which are kept whatever their scores.
    keep_rate
        ceil(keep_rate · num_chunks) are kept, the forced ones among them.

    Returns
    -------
    list of int
        Indices, sorted. Ties go to the earlier chunk.
    """
    num_chunks = len(scores)
    forced = {*range(min(config.keep_first, num_chunks)), *range(max(0, num_chunks - config.keep_last), num_chunks)}
    budget = max(len(forced), math.ceil(keep_rate * num_chunks - 1e-9))
    ranked = torch.argsort(scores, descending=True, stable=True).tolist()
    chosen = [chunk for chunk in ranked if chunk not in forced][: budget - len(forced)]
    return sorted({*forced, *chosen})


def select(
    prompt_ids: Sequence[int],
    importance: torch.Tensor | None,
    config: PrefillConfig,
    protected: Iterable[tuple[int, int]] = (),
    question: tuple[int, int] | None = None,
) -> Selection:
    """The kept chunks as token ids at their original positions.

    Parameters
    ----------
    prompt_ids
        The whole prompt.
    importance
        (num_prompt_tokens,) from the draft's attention; None for a scorer that does without.
    config
        Who votes, and how many chunks are kept.
    protected
        Half-open token spans that are kept on top of the chunks, token by token (the system message, the template's own
        tokens).
    question
        Half-open span that is what is asked, or that ends with it (the last user turn); None is the whole prompt.
    """
    num_tokens, size = len(prompt_ids), config.chunk_size
    scores = SCORERS[config.scorer](Evidence(prompt_ids, importance, question), config)
    kept = {
        position
        for chunk in select_chunks(scores, config, config.rate_for(num_tokens))
        for position in range(chunk * size, min((chunk + 1) * size, num_tokens))
    }
    for start, stop in protected:
        kept.update(range(max(start, 0), min(stop, num_tokens)))
    positions = sorted(kept)
    return Selection([prompt_ids[position] for position in positions], positions, num_tokens)
