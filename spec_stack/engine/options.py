"""The options of a call, listed once; `GenerationMixin.generate` documents them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, cast

import torch

from spec_stack.config import SamplingParams, SparsePrefill, check_logprobs
from spec_stack.controller.base import Policy
from spec_stack.engine.progress import OnProgress
from spec_stack.hf.processors import Processor
from spec_stack.hf.prompt import EncodedPrompt, Message, PromptSource, Span, unpadded
from spec_stack.settings.checks import plain


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate` and `stream`."""

    # The prompt, where it is no text.
    messages: Sequence[Message] | None
    input_ids: Sequence[int] | torch.Tensor | None
    attention_mask: Sequence[int] | torch.Tensor | None
    protected: Sequence[Span]
    tools: Sequence[Any] | None
    tool_choice: str | Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    # Sampling and stopping: as one object, or one by one.
    params: SamplingParams | None
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    bad_words_ids: Sequence[Sequence[int]]
    logit_bias: Mapping[int, float] | None
    min_tokens: int
    stop_token_ids: Sequence[int]
    sampling: str | None
    logits_processor: Processor | Sequence[Processor] | None
    response_format: Mapping[str, Any] | type | None
    logprobs: int | None
    # Pruning and drafting.
    keep_rate: float | None
    sparse_prefill: SparsePrefill | None
    policy: str | Policy | None
    gamma: int | None
    proposer: str | None
    # Labels and the progress callback.
    request_id: str | None
    task: str
    on_progress: OnProgress | None


class Call(GenerateOptions, total=False):
    """A call's options with its prompt: a text, or an encoded one."""

    prompt: str | None
    encoded: EncodedPrompt | None


DEFAULTS: dict[str, Any] = {
    **{entry.name: getattr(SamplingParams, entry.name) for entry in fields(SamplingParams)},
    **{"stop": None, "protected": (), "continue_final_message": False, "task": ""},
}
"""Of the options whose default is not None."""
_OF_PROMPT = tuple(entry.name for entry in fields(PromptSource))
_OF_SAMPLING = tuple(entry.name for entry in fields(SamplingParams))
# Options without a check elsewhere.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "proposer": ("a name or None", lambda value: isinstance(value, str | None)),
    "request_id": ("a string", lambda value: isinstance(value, str | None)),
    "task": ("a string", lambda value: isinstance(value, str)),
    "sampling": (
        '"model" (the checkpoint\'s own) or None',
        lambda value: value is None or (isinstance(value, str) and value == "model"),
    ),
    "on_progress": (
        "a callable over (num_done, num_total, phase)",
        lambda value: value is None or callable(value),
    ),
}


def prompt_source(call: Call) -> PromptSource:
    given = {name: value for name, value in call.items() if name in _OF_PROMPT and value is not None}
    ids = unpadded(call.get("input_ids"), call.get("attention_mask"))
    if isinstance(call.get("tool_choice"), str) and call.get("tool_choice") == "none":
        given.pop("tools", None)
    return PromptSource(**cast(dict[str, Any], given | ({} if ids is None else {"input_ids": ids})))


def sampling_params(call: Call) -> SamplingParams:
    """The sampling options of a call. Raises ValueError where both the object and single options are given."""
    given = {name: value for name, value in call.items() if name in _OF_SAMPLING}
    if given.get("stop") is None:
        given.pop("stop", None)
    single = SamplingParams(**cast(dict[str, Any], given))
    params = call.get("params")
    if params is None:
        return single
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
    if single != SamplingParams():
        raise ValueError("give params or single sampling options (max_tokens, temperature, …), not both")
    return params


def checked(call: Call) -> Call:
    """The call with plain numbers. Raises ValueError for a bad value of an option without a check elsewhere."""
    numbers = {name: plain(value) for name, value in call.items() if name in ("keep_rate", "gamma", "logprobs")}
    call = cast(Call, {**call, **numbers})
    check_logprobs(call.get("logprobs"))
    for name, (what, holds) in _CHECKS.items():
        if name in call and not holds(call.get(name)):
            raise ValueError(f"{name} must be {what}, got {call.get(name)!r}")
    return call
