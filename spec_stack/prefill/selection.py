"""From importance to the prompt tokens the target reads (SpecPrefill, section 3.2.3). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from spec_stack.config import PrefillConfig
from spec_stack.types import Selection


def select_chunks(importance: torch.Tensor, config: PrefillConfig) -> list[int]:
    """Indices of the chunks to keep, sorted: the first and last ones, then the most important, up to
    ceil(keep_rate · num_chunks). Ties go to the earlier chunk."""
    num_tokens, size = importance.shape[0], config.chunk_size
    num_chunks = math.ceil(num_tokens / size)
    padded = torch.nn.functional.pad(importance, (0, num_chunks * size - num_tokens))
    # The last chunk may be shorter; it is kept whatever its mean.
    means = padded.reshape(num_chunks, size).mean(dim=1)
    forced = {*range(min(config.keep_first, num_chunks)), *range(max(0, num_chunks - config.keep_last), num_chunks)}
    budget = max(len(forced), math.ceil(config.keep_rate * num_chunks - 1e-9))
    ranked = torch.argsort(means, descending=True, stable=True).tolist()
    chosen = [chunk for chunk in ranked if chunk not in forced][: budget - len(forced)]
    return sorted({*forced, *chosen})


def select(
    prompt_ids: Sequence[int],
    importance: torch.Tensor,
    config: PrefillConfig,
    protected: Iterable[tuple[int, int]] = (),
) -> Selection:
    """The kept chunks as token ids at their original positions.

    importance (num_prompt_tokens,). protected: half-open token spans that are kept on top of the chunks, token
    by token (the system message, the template's own tokens).
    """
    num_tokens, size = len(prompt_ids), config.chunk_size
    kept = {
        position
        for chunk in select_chunks(importance, config)
        for position in range(chunk * size, min((chunk + 1) * size, num_tokens))
    }
    for start, stop in protected:
        kept.update(range(max(start, 0), min(stop, num_tokens)))
    positions = sorted(kept)
    return Selection([prompt_ids[position] for position in positions], positions, num_tokens)
