"""Sampling options: transformers' processors for them, and those of a checkpoint's generation config."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

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

# transformers' default for a sampling config without a temperature.
_TOP_K = 50
# Our options by transformers' names; those used only when sampling are marked.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words_ids",
    "stop_strings": "stop",
}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
# Settings that change the next token and have no option here, with their neutral values beside None.
_UNKNOWN: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "penalty_alpha"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("sequence_bias", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
}
_UNKNOWN_SAMPLED: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    "top_h": (),
}


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


def complete_sampling(generation_config: Any, params: SamplingParams) -> SamplingParams:
    """A call's options, with the checkpoint's values for those at their defaults."""
    own = model_sampling(generation_config)
    defaults = SamplingParams()
    changes = {
        entry.name: own[entry.name]
        for entry in fields(SamplingParams)
        if entry.name in own and getattr(params, entry.name) == getattr(defaults, entry.name)
    }
    return replace(params, **changes)


def model_sampling(generation_config: Any) -> dict[str, Any]:
    """The checkpoint's settings by `SamplingParams` names. Raises ValueError for settings without an option."""
    samples = bool(getattr(generation_config, "do_sample", False))
    unknown = _UNKNOWN | (_UNKNOWN_SAMPLED if samples else {})
    strange = [name for name, idle in unknown.items() if getattr(generation_config, name, None) not in (None, *idle)]
    if strange:
        raise ValueError(
            f'sampling="model": the generation config sets {", ".join(strange)}, which have no option here; give '
            "them as logits_processor, and the rest as options"
        )
    own = {ours: getattr(generation_config, theirs, None) for theirs, ours in _NAMES.items()}
    if samples:
        own |= {name: getattr(generation_config, name, None) for name in _SAMPLED}
        own["temperature"] = 1.0 if own["temperature"] is None else own["temperature"]
        own["top_k"] = _TOP_K if own["top_k"] is None else own["top_k"]
    return {name: value for name, value in own.items() if value is not None}


def ignored_sampling(generation_config: Any, params: SamplingParams) -> str:
    """The checkpoint's settings that a greedy call without sampling="model" ignores, as text; empty if none."""
    if params.temperature:
        return ""
    samples = bool(getattr(generation_config, "do_sample", False))
    names = [*(_SAMPLED if samples else ()), *(["repetition_penalty"] if params.repetition_penalty == 1 else [])]
    settings = {name: getattr(generation_config, name, None) for name in names}
    found = [f"{name}={value}" for name, value in settings.items() if value is not None and value not in (0, 1)]
    return ", ".join(["do_sample=True", *found] if samples else found)
