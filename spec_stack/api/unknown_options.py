"""Errors for unknown options that name the function and suggest an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

# Options, and what transformers, vLLM, SGLang, mlx-lm and earlier versions call them or what does the same here.
_NAMES_ELSEWHERE = {
    "prompt": ("text", "inputs"),
    "messages": ("conversation",),
    "input_ids": ("prompt_ids", "prompt_token_ids", "token_ids"),
    "params": ("sampling_params",),
    "max_tokens": ("max_new_tokens", "max_length"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "temperature": ("do_sample",),
    "repetition_penalty": ("presence_penalty", "frequency_penalty"),
    "logit_bias": ("sequence_bias",),
    "stop": ("stop_strings",),
    "stop_token_ids": ("eos_token_id",),
    "sampling": ("generation_config", "use_model_defaults"),
    "n": ("num_return_sequences",),
    "logprobs": ("output_scores", "output_logits", "return_dict_in_generate", "top_logprobs", "top_n_tokens"),
    "response_format": ("guided_json", "guided_regex", "guided_grammar", "structured_outputs"),
    "logits_processor": (
        *("logits_processors", "prefix_allowed_tokens_fn", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "renormalize_logits", "watermarking_config"),
    ),
    "keep_rate": ("compression_ratio",),
    "sparse_prefill": ("specprefill", "prune"),
    "gamma": ("num_draft_tokens", "num_assistant_tokens", "num_speculative_tokens"),
    "policy": ("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    "proposer": ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    "target": ("model", "model_name_or_path", "pretrained_model_name_or_path"),
    "draft": ("assistant_model", "draft_model"),
    "precision": ("dtype", "torch_dtype", "load_in_4bit", "load_in_8bit", "quantization_config"),
}
ALIASES = {name: option for option, names in _NAMES_ELSEWHERE.items() for name in names}
# What does not exist here by another name.
_ELSEWHERE = {
    "assistant_model": "the draft is given once, to SpecStackGenerator(target, draft)",
    "draft_model": "the draft is given once, to SpecStackGenerator(target, draft)",
    "stopping_criteria": "stop=, max_tokens= and max_time= end an answer, and closing a stream at any time",
    "num_beams": "answers are greedy or sampled; n= samples several",
    "penalty_alpha": "answers are greedy or sampled",
    "past_key_values": "generator.session() keeps the caches between calls",
    "use_cache": "the caches are always used; generator.session() keeps them between calls",
    "synced_gpus": "one process generates",
}
# Options that only `generate` takes, given to a stream.
_WHOLE_ANSWERS = ("streamer", "n", "records", "return_records")
# Least similarity for a suggestion.
_LIKENESS = 0.75


def shows_options(options: type, **defaults: object) -> Callable[[Function], Function]:
    """Give a function with **options the signature of this TypedDict. defaults: those that are not None."""
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind)
        for name, kind in options.__annotations__.items()
    ]

    def complete(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind != inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return complete


def unknown_option(function: Callable[..., object], name: str) -> TypeError:
    """The error for an unknown option: the function's name and the nearest option."""
    known = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
    return TypeError(f"{function.__name__}() has no option {name!r}{_hint(name, known)}")


def refuses_unknown_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make an unknown keyword raise `unknown_option`."""
    known = inspect.signature(function).parameters.keys()

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs.keys() - known:
            raise unknown_option(function, name)
        return function(*args, **kwargs)

    return checked


def _hint(name: str, known: list[str]) -> str:
    from transformers import GenerationConfig

    if name in _WHOLE_ANSWERS and "prompt" in known:
        return ": generate() takes it; a stream's steps bring their tokens, text and record"
    if name in _ELSEWHERE and "prompt" in known:
        return f"; {_ELSEWHERE[name]}"
    alias = ALIASES.get(name)
    if alias not in known and "prompt" in known and name in vars(GenerationConfig()):
        # Not a misspelling, whatever it is like.
        return ", which is Transformers' and has no counterpart here; leave it out"
    nearest = [alias] if alias in known else get_close_matches(name, known, 1, cutoff=_LIKENESS)
    return f"; did you mean {nearest[0]}=?" if nearest else f"; it has {', '.join(known)}"
