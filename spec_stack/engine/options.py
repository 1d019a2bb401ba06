"""The options of a call, listed once; `GenerationMixin.generate` documents them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from spec_stack.config import SamplingParams, SparsePrefill
from spec_stack.controller.base import Policy
from spec_stack.engine.progress import OnProgress
from spec_stack.hf.processors import Processor
from spec_stack.hf.prompt import EncodedPrompt, Message, Span


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
