"""Sampling filters and penalties by transformers' logits processors."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from spec_stack.config import SamplingParams
from spec_stack.hf.processors import Processor


def make_warp(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Logits (n, vocab) → warped logits: temperature, top_k, top_p, then min_p. None for temperature 0 (greedy)."""
    if temperature == 0:
        return None
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(float(min_p)))
    no_ids = torch.empty(0, dtype=torch.long)
    return lambda logits: processors(no_ids, logits)


def make_processors(
    params: SamplingParams, num_prompt_tokens: int, end_ids: Collection[int], device: torch.device
) -> list[Processor]:
    """Processors for the options that depend on earlier tokens, in the order of transformers' `generate`."""
    processors: list[Processor] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(int(at),): float(b) for at, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.bad_words_ids:
        words = [[int(token_id) for token_id in word] for word in params.bad_words_ids]
        processors.append(NoBadWordsLogitsProcessor(words))
    if params.min_tokens and end_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, sorted(end_ids), device=str(device))
        )
    return processors
