"""Sampling options from a checkpoint's generation config."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from spec_stack.config import SamplingParams

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
# Settings that change the next token and have no option here, with their neutral values.
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
    """The checkpoint's settings by `SamplingParams` names; raises ValueError as `complete_sampling`."""
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
    """The checkpoint's settings that a greedy call without sampling="model" ignores, as text; empty if none."""
    if params.temperature:
        return ""
    samples = bool(getattr(generation_config, "do_sample", False))
    names = [*(_SAMPLED if samples else ()), *(["repetition_penalty"] if params.repetition_penalty == 1 else [])]
    settings = {name: getattr(generation_config, name, None) for name in names}
    found = [f"{name}={value}" for name, value in settings.items() if value is not None and value not in (0, 1)]
    return ", ".join(["do_sample=True", *found] if samples else found)
