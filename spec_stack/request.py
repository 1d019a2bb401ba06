"""A request's options, checked before any work: what `SpecStackGenerator.stream` was asked, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from spec_stack.config import PrefillConfig, SamplingParams
from spec_stack.controller.base import GammaPolicy
from spec_stack.decode.loop import RequestLabels
from spec_stack.hf.prompt import Span, encode_messages, encode_text
from spec_stack.types import Reading


class StreamOptions(TypedDict, total=False):
    """Everything `SpecStackGenerator.stream` takes beside the prompt; see there."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    keep_rate: float | None
    specprefill: bool | None
    policy: str | GammaPolicy | None
    gamma: int | None
    request_id: str | None
    task: str


@dataclass(frozen=True)
class Request:
    """reading: the prompt as a draft with another tokenizer reads it, None where the draft reads the target's tokens or
    is not used. prepared_s: seconds between the call and the first step's start, tokenizing mostly."""

    prompt_ids: list[int]
    protected: list[Span]
    params: SamplingParams
    prefill: PrefillConfig
    scores: bool
    reason: str
    lend_policy: Callable[[], AbstractContextManager[GammaPolicy]]
    labels: RequestLabels
    prepared_s: float
    reading: Reading | None = None


def encode_prompt(
    tokenizer: Any,
    vocab_size: int,
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    input_ids: Sequence[int] | torch.Tensor | None,
) -> tuple[list[int], list[Span]]:
    """Token ids of the one prompt given, and the spans of it that must stay dense.

    Raises ValueError for none or several, an empty one, one of the wrong type, ids outside the vocabulary.
    """
    if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages or input_ids")
    protected: list[Span] = []
    if input_ids is not None:
        prompt_ids = _check_ids(input_ids, vocab_size)
    elif tokenizer is None:
        raise ValueError("this generator was made without a tokenizer; give input_ids")
    elif messages is not None:
        prompt_ids, protected = encode_messages(tokenizer, messages)
    elif isinstance(prompt, str):
        prompt_ids = encode_text(tokenizer, prompt) if prompt else []
    else:
        raise ValueError(f"prompt must be one string, got {type(prompt).__name__}; see messages= and input_ids=")
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    return prompt_ids, protected


def _check_ids(input_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> list[int]:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input_ids must be one sequence of ints, got {type(input_ids).__name__}: {error}") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or (ids.numel() and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())):
        raise ValueError(f"input_ids must be one sequence of ints, got {ids.dtype} of shape {tuple(ids.shape)}")
    token_ids: list[int] = ids.tolist()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"input_ids must lie in 0…{vocab_size - 1}, the target's vocabulary")
    return token_ids


def check_length(role: str, num_prompt_tokens: int, max_tokens: int, limit: int) -> None:
    """Raise ValueError where a request would run past the positions that the model was made for."""
    if num_prompt_tokens + max_tokens > limit:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens + max_tokens={max_tokens} exceed the {role}'s {limit} positions; "
            "shorten the prompt or lower max_tokens"
        )
