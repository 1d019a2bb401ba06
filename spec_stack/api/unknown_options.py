"""Errors for unknown options that name the function and suggest an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from spec_stack.config import OLD_SWITCHES

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

# Names of the same options elsewhere (transformers, vLLM, SGLang, mlx-lm).
ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "do_sample": "temperature",
    "prompt_ids": "input_ids",
    "prompt_token_ids": "input_ids",
    "token_ids": "input_ids",
    "model": "target",
    "model_name_or_path": "target",
    "pretrained_model_name_or_path": "target",
    "text": "prompt",
    "inputs": "prompt",
    "conversation": "messages",
    "stop_strings": "stop",
    "sampling_params": "params",
    "num_draft_tokens": "gamma",
    "num_assistant_tokens": "gamma",
    "num_speculative_tokens": "gamma",
    "assistant_model": "draft",
    "draft_model": "draft",
    "torch_dtype": "dtype",
    "compression_ratio": "keep_rate",
    "num_return_sequences": "n",
    "output_scores": "logprobs",
    "output_logits": "logprobs",
    "return_dict_in_generate": "logprobs",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "eos_token_id": "stop_token_ids",
    "sequence_bias": "logit_bias",
    "logits_processors": "logits_processor",
    "guided_json": "response_format",
    "guided_regex": "response_format",
    "guided_grammar": "response_format",
    "structured_outputs": "response_format",
    "prefix_allowed_tokens_fn": "logits_processor",
}
_IN_GENERATE = "model.generate(..., custom_generate=with_draft(draft)) takes it (`from spec_stack import with_draft`)"
_PLAIN = "call model.generate without custom_generate for it"
_LOADED = "load both models with it by transformers, and pass them to SpecStackGenerator(target, draft, tokenizer)"
# Options without a counterpart, by the alternative.
_ALTERNATIVES = {
    _IN_GENERATE: ("stopping_criteria",),
    f'sampling="model" applies the checkpoint\'s own; {_IN_GENERATE}': ("generation_config",),
    "the draft is given where the generator is made": ("assistant_model",),
    "the generator has one; another goes to SpecStackGenerator(target, draft, tokenizer)": ("tokenizer",),
    "the tokenizers are compared when the pair loads; draft_tokenizer= names another": ("assistant_tokenizer",),
    "generator.session() keeps caches from call to call": ("cache", "past_key_values", "use_cache"),
    "the generator makes and keeps its own caches; leave it out": (
        *("cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    ),
    "it is prefill_chunk of the PrefillConfig that the generator is made with": ("prefill_chunk_size",),
    "one request at a time; batches are the SGLang plugin's": ("continuous_batching_config",),
    "the tokens of a prompt are at 0, 1, 2, …; keep_rate= prunes one at its own positions": ("position_ids",),
    "a prompt is token ids only; leave it out": ("inputs_embeds", "token_type_ids", "pixel_values"),
    "a prompt is taken as it stands; put the token into input_ids": ("bos_token_id", "decoder_start_token_id"),
    "nothing is padded; leave it out": ("pad_token_id",),
    "one process generates; leave it out": ("synced_gpus",),
    f"beam search is not done; {_PLAIN}": (
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "constraints"),
        *("force_words_ids", "low_memory"),
    ),
    _PLAIN: (
        *("penalty_alpha", "dola_layers", "guidance_scale", "negative_prompt_ids", "negative_prompt_attention_mask"),
        *("token_healing", "output_attentions", "output_hidden_states"),
    ),
    "close the stream when it has taken long enough": ("max_time",),
    'sampling="model" applies what the checkpoint sets': ("use_model_defaults",),
    "it is for model.generate (`from spec_stack import with_draft`)": ("custom_generate",),
    'proposer="ngram" proposes from the text': ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    'policy="heuristic" is the schedule "heuristic", gamma= the constant one': ("num_assistant_tokens_schedule",),
    'policy="confidence" has it at 0.4, Confidence(threshold=...) at others': ("assistant_confidence_threshold",),
    "policy= and gamma= say how tokens are proposed": (
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("is_assistant", "speculation_type", "use_mtp"),
    ),
    "repetition_penalty= is near it, and a logits processor can do it": ("presence_penalty", "frequency_penalty"),
    'precision="nf4"': ("load_in_4bit",),
    'precision="int8"': ("load_in_8bit",),
    f'precision="int8" or "nf4"; for others, {_LOADED}': ("quantization_config",),
    _LOADED: ("attn_implementation", "subfolder", "max_memory", "offload_folder"),
    "SpecStackConfig(prefix_cache=PrefixCacheConfig(max_tokens=...)) prefills a common prefix once": ("share",),
    "set HF_HOME": ("cache_dir",),
    "set HF_HUB_OFFLINE=1": ("local_files_only",),
}
WAYS = {name: way for way, names in _ALTERNATIVES.items() for name in names}
# Processor classes for transformers' options that are processors there.
PROCESSORS = {
    "typical_p": "TypicalLogitsWarper",
    "top_h": "TopHLogitsWarper",
    "epsilon_cutoff": "EpsilonLogitsWarper",
    "eta_cutoff": "EtaLogitsWarper",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor",
    "encoder_no_repeat_ngram_size": "EncoderNoRepeatNGramLogitsProcessor",
    "encoder_repetition_penalty": "EncoderRepetitionPenaltyLogitsProcessor",
    "exponential_decay_length_penalty": "ExponentialDecayLengthPenalty",
    "suppress_tokens": "SuppressTokensLogitsProcessor",
    "begin_suppress_tokens": "SuppressTokensAtBeginLogitsProcessor",
    "forced_bos_token_id": "ForcedBOSTokenLogitsProcessor",
    "forced_eos_token_id": "ForcedEOSTokenLogitsProcessor",
    "remove_invalid_values": "InfNanRemoveLogitsProcessor",
    "renormalize_logits": "LogitNormalization",
    "watermarking_config": "WatermarkLogitsProcessor",
}
WAYS |= {name: f"give it as a logits processor, {processor}(...)" for name, processor in PROCESSORS.items()}
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


def parameters_of(model: Callable[..., object], until: str) -> Callable[[Function], Function]:
    """Copy the "Parameters" section of another function up to this parameter, without it."""
    _, _, section = (inspect.getdoc(model) or "").partition("Parameters\n----------\n")
    section = section.partition(f"\n{until} : ")[0]

    def complete(function: Function) -> Function:
        before, opening, after = (inspect.getdoc(function) or "").partition("Returns\n-------\n")
        function.__doc__ = f"{before}Parameters\n----------\n{section}\n\n{opening}{after}"
        return function

    return complete


def _hint(name: str, known: list[str]) -> str:
    if name in OLD_SWITCHES and "sparse_prefill" in known:
        return f": it is now sparse_prefill=, {OLD_SWITCHES[name]}"
    alias = ALIASES.get(name)
    if name in _WHOLE_ANSWERS and "prompt" in known:
        return ": generate() takes it; a stream's steps bring their tokens, text and record"
    if name in WAYS and alias not in known:
        return f": {WAYS[name]}"
    nearest = [alias] if alias in known else get_close_matches(name, known, 1, cutoff=_LIKENESS)
    return f"; did you mean {nearest[0]}=?" if nearest else f"; it has {', '.join(known)}"
