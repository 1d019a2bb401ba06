"""Sampling filters: transformers' own logits processors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def make_warp(temperature: float, top_k: int, top_p: float) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Logits (n, vocab) → warped logits: temperature, then top_k, then top_p. None for temperature 0 (greedy)."""
    if temperature == 0:
        return None
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    no_ids = torch.empty(0, dtype=torch.long)
    return lambda logits: processors(no_ids, logits)
