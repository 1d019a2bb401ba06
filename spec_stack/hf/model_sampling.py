"""Sampling as a checkpoint's own generation config sets it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from spec_stack.config import SamplingParams

# transformers' own default where a config samples and names none.
_TOP_K = 50
# Ours, by transformers' names; those that only a sampled request has are marked.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words_ids",
    "stop_strings": "stop",
}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
# Settings with a say in which token comes next that have no option here, with the values that mean nothing.
_UNKNOWN: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "sequence_bias": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0),
}
_UNKNOWN_SAMPLED: dict[str, tuple[object, ...]] = {
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
}


def complete_sampling(generation_config: Any, params: SamplingParams) -> SamplingParams:
    """The options of a call, with the checkpoint's own where they are at their defaults."""
    own = model_sampling(generation_config)
    defaults = SamplingParams()
    changes = {
        entry.name: own[entry.name]
        for entry in fields(SamplingParams)
        if entry.name in own and getattr(params, entry.name) == getattr(defaults, entry.name)
    }
    return replace(params, **changes)


def model_sampling(generation_config: Any) -> dict[str, Any]:
    """The checkpoint's settings by the names of `SamplingParams`; raises ValueError as `complete_sampling` does."""
    samples = bool(getattr(generation_config, "do_sample", False))
    unknown = _UNKNOWN | (_UNKNOWN_SAMPLED if samples else {})
    strange = [name for name, idle in unknown.items() if getattr(generation_config, name, None) not in idle]
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
    """The checkpoint's settings that a call without sampling="model" leaves aside, as a list; empty where it has none,
    or the call draws in a way of its own."""
    if params.temperature:
        return ""
    samples = bool(getattr(generation_config, "do_sample", False))
    names = [*(_SAMPLED if samples else ()), *(["repetition_penalty"] if params.repetition_penalty == 1 else [])]
    settings = {name: getattr(generation_config, name, None) for name in names}
    found = [f"{name}={value}" for name, value in settings.items() if value is not None and value not in (0, 1)]
    return ", ".join(["do_sample=True", *found] if samples else found)
