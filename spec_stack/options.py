"""Calls with an option that is none: say which function, and what the option may have been meant to be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# What the same thing is called elsewhere (transformers, vLLM, SGLang, mlx-lm).
ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "do_sample": "temperature",
    "prompt_ids": "input_ids",
    "prompt_token_ids": "input_ids",
    "token_ids": "input_ids",
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
    "eos_token_id": "stop_token_ids",
    "sequence_bias": "logit_bias",
    "logits_processors": "logits_processor",
    "generation_config": "sampling",
    "guided_json": "response_format",
    "structured_outputs": "response_format",
    "prefix_allowed_tokens_fn": "logits_processor",
}
# What has no counterpart of one name: how it is done instead.
_IN_GENERATE = "model.generate(..., custom_generate=spec_stack(draft)) takes it (spec_stack.custom_generate)"
WAYS = {
    "stopping_criteria": _IN_GENERATE,
    "generation_config": _IN_GENERATE,
    "assistant_model": "the draft is given where the generator is made",
    "tokenizer": "the generator has one; give it where the generator is made",
    "past_key_values": "generator.session() keeps caches from call to call",
    "use_cache": "generator.session() keeps caches from call to call",
    "position_ids": "the tokens of a prompt are at 0, 1, 2, …; keep_rate= prunes one at its own positions",
    "num_beams": "beam search is not done; call model.generate without custom_generate for it",
    "max_time": "close the stream when it has taken long enough",
    "custom_generate": "it is for model.generate (spec_stack.custom_generate)",
    "prompt_lookup_num_tokens": "policy= and gamma= say how tokens are proposed",
    "typical_p": "give it as a logits processor, TypicalLogitsWarper(...)",
    "output_attentions": "call model.generate without custom_generate for it",
    "output_hidden_states": "call model.generate without custom_generate for it",
}


def refuses_unknown_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make an unknown keyword raise a TypeError that names the function called and the nearest option."""
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}() has no option {name!r}{_hint(name, known)}")
        return function(*args, **kwargs)

    return checked


def _hint(name: str, known: list[str]) -> str:
    alias = ALIASES.get(name)
    if name in WAYS and alias not in known:
        return f": {WAYS[name]}"
    nearest = [alias] if alias in known else get_close_matches(name, known, 1, cutoff=0.5)
    return f"; did you mean {nearest[0]}=?" if nearest else f"; it has {', '.join(known)}"
