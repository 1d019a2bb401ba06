"""What can be asked: generate and stream, alike for a generator and for a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_stack.config import SamplingParams
from spec_stack.controller.base import Policy
from spec_stack.hf.prompt import Message, PromptSource, Span, unpadded
from spec_stack.offline.records import add_records, check_record_path
from spec_stack.options import refuses_unknown_options
from spec_stack.request import CallOptions, Request
from spec_stack.streaming import Streamer, awaitable, feed
from spec_stack.types import GenerationResult, StepOutput


class Answering(ABC):
    """Has `generate` and `stream`; how a call is planned and run is its own."""

    @abstractmethod
    def _plan(self, source: PromptSource, params: SamplingParams, options: CallOptions) -> Request:
        """Check a call, and settle what is done for it."""

    @abstractmethod
    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        """The request's steps."""

    @refuses_unknown_options
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        attention_mask: Sequence[int] | torch.Tensor | None = None,
        protected: Sequence[Span] = (),
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        params: SamplingParams | None = None,
        max_tokens: int = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        keep_rate: float | None = None,
        specprefill: bool | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        proposer: str | None = None,
        request_id: str | None = None,
        task: str = "",
        return_records: bool = False,
        records: str | Path | None = None,
        streamer: Streamer | None = None,
    ) -> GenerationResult:
        """Answer or continue a prompt.

        Exactly one of `prompt`, `messages` and `input_ids` is given.

        Parameters
        ----------
        prompt : str, optional
            A text to go on with.
        messages : sequence of mapping, optional
            A chat, `{"role": ..., "content": ...}` each, rendered by the tokenizer's template. A content is a text, or
            a list of parts of the type "text", which are joined by line breaks; an assistant's may be missing beside
            its `tool_calls`. System messages and the template's own tokens are never pruned.
        input_ids : sequence of int or torch.Tensor, optional
            Token ids (N,) or (1, N) of the target.
        attention_mask : sequence of int or torch.Tensor, optional
            Of the shape of `input_ids`, so that what a tokenizer returns can be handed on; tokens at either end for
            which it is 0 are padding, and left out.
        protected : sequence of (int, int), optional
            Half-open spans that are never pruned: of tokens beside `input_ids`, of characters beside `prompt`.
        tools, documents : sequence, optional
            Handed to the chat template, which writes them into the prompt, where they are never pruned.
        chat_template_kwargs : mapping, optional
            More for the chat template, `{"enable_thinking": False}` say.
        continue_final_message : bool
            Go on with the text of the last message, instead of beginning an answer to it.
        params : SamplingParams, optional
            The options from max_tokens to ignore_eos as one object, in their place.
        max_tokens : int
            Most tokens to generate.
        temperature : float
            0 is greedy.
        top_k : int
            Draw among this many most likely tokens; 0 is off.
        top_p : float
            Draw among the most likely tokens that have this share of the probability; 1.0 is off.
        seed : int, optional
            Makes a sampled call reproducible. Policies that watch the clock propose other lengths in every run, and so
            draw other tokens of the same distribution: where the generator's own is one of them, a seeded call that
            names no policy is "fixed"; one named by the call has learned nothing yet.
        stop : str or sequence of str, optional
            Strings that end the text; they are not part of it.
        ignore_eos : bool
            Go on past the end-of-sequence token (for benchmarks).
        keep_rate : float, optional
            Share of the prompt, in a session of its new text, that the target prefills, over 0 to 1; None is the
            configuration's.
        specprefill : bool, optional
            Prune the prompt, in a session its new text: True whatever its length, False never, None from
            `PrefillConfig.min_prompt_tokens` tokens on.
        policy : str or Policy, optional
            What chooses gamma, the number of tokens drafted in a step; None is the generator's.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        proposer : str, optional
            Who proposes: "model", "lookup", "both" or "auto" (see `DecodeConfig`); None is the generator's.
        request_id, task : str, optional
            Labels of the records.
        return_records : bool
            Keep one StepRecord per step in the result.
        records : str or Path, optional
            Append the records to this .jsonl file, which is made where there is none (`offline.records`).
        streamer : optional
            A streamer of transformers (`TextStreamer`, say): it is put the prompt, then every step's tokens, and told
            of the end.

        Returns
        -------
        GenerationResult
            token_ids, text, finish_reason ("eos", "stop" or "length"), metrics, records.

        Raises
        ------
        ValueError
            For a value that cannot be used, before any work; the message says what to change.
        TypeError
            For an unknown option; the message names the nearest one.

        Examples
        --------
        >>> from spec_stack import SpecStackGenerator
        >>> generator = SpecStackGenerator.from_pretrained()
        >>> result = generator.generate("def main():", max_tokens=8, gamma=4)
        >>> len(result.token_ids), result.metrics.num_prompt_tokens
        (8, 4)
        """
        if records is not None:
            check_record_path(records, request_id)
        request = self._plan(
            _source(
                prompt,
                messages,
                unpadded(input_ids, attention_mask),
                protected,
                tools,
                documents,
                chat_template_kwargs,
                continue_final_message,
            ),
            _merged(params, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos),
            CallOptions(keep_rate, specprefill, policy, gamma, proposer, request_id, task),
        )
        running = self._run(request)
        outputs = list(running if streamer is None else feed(streamer, request.prompt_ids, running))
        steps = [output.record for output in outputs]
        last = outputs[-1]
        if last.finish_reason is None or last.metrics is None:
            raise RuntimeError("the stream ended without a last step")
        if records is not None:
            add_records(steps, records)
        return GenerationResult(
            token_ids=[token_id for output in outputs for token_id in output.token_ids],
            text="".join(output.text for output in outputs),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            records=steps if return_records else None,
        )

    @refuses_unknown_options
    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        attention_mask: Sequence[int] | torch.Tensor | None = None,
        protected: Sequence[Span] = (),
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        params: SamplingParams | None = None,
        max_tokens: int = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        keep_rate: float | None = None,
        specprefill: bool | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        proposer: str | None = None,
        request_id: str | None = None,
        task: str = "",
    ) -> Generator[StepOutput, None, None]:
        """Answer or continue a prompt, step by step.

        The arguments are checked before this returns; the work begins with the first `next`.

        Parameters
        ----------
        prompt, messages, input_ids, attention_mask
            The prompt: exactly one of a text, a chat, and token ids (N,) or (1, N), these with their mask.
        protected, tools, documents, chat_template_kwargs, continue_final_message
            What is never pruned, and how a chat is rendered (see `generate`).
        params : SamplingParams, optional
            The options from max_tokens to ignore_eos as one object, in their place.
        max_tokens : int
            Most tokens to generate.
        temperature : float
            0 is greedy.
        top_k : int
            Draw among this many most likely tokens; 0 is off.
        top_p : float
            Draw among the most likely tokens that have this share of the probability; 1.0 is off.
        seed : int, optional
            Makes a sampled call reproducible (see `generate`).
        stop : str or sequence of str, optional
            Strings that end the text; they are not part of it.
        ignore_eos : bool
            Go on past the end-of-sequence token (for benchmarks).
        keep_rate : float, optional
            Share of the prompt, in a session of its new text, that the target prefills, over 0 to 1; None is the
            configuration's.
        specprefill : bool, optional
            Prune the prompt, in a session its new text: True whatever its length, False never, None from
            `PrefillConfig.min_prompt_tokens` tokens on.
        policy : str or Policy, optional
            What chooses gamma, the number of tokens drafted in a step; None is the generator's.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        proposer : str, optional
            Who proposes: "model", "lookup", "both" or "auto" (see `DecodeConfig`); None is the generator's.
        request_id, task : str, optional
            Labels of the records.

        Returns
        -------
        generator of StepOutput
            One per step, as soon as it is there; the last carries finish_reason and metrics, whose durations count from
            the call, without the time that the caller lets pass before or between steps.

        Raises
        ------
        ValueError
            For a value that cannot be used; the message says what to change.
        TypeError
            For an unknown option; the message names the nearest one.

        Examples
        --------
        >>> from spec_stack import SpecStackGenerator
        >>> generator = SpecStackGenerator.from_pretrained()
        >>> sum(len(output.token_ids) for output in generator.stream("def main():", max_tokens=8))
        8
        """
        request = self._plan(
            _source(
                prompt,
                messages,
                unpadded(input_ids, attention_mask),
                protected,
                tools,
                documents,
                chat_template_kwargs,
                continue_final_message,
            ),
            _merged(params, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos),
            CallOptions(keep_rate, specprefill, policy, gamma, proposer, request_id, task),
        )
        return self._run(request)

    astream = awaitable(stream)
    """`stream` for code that awaits: `async for output in generator.astream(...)`. The steps are made in a thread."""


def _source(
    prompt: str | None,
    messages: Sequence[Message] | None,
    input_ids: Sequence[int] | torch.Tensor | None,
    protected: Sequence[Span],
    tools: Sequence[Any] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    continue_final_message: bool,
) -> PromptSource:
    more = {} if chat_template_kwargs is None else chat_template_kwargs
    return PromptSource(prompt, messages, input_ids, protected, tools, documents, more, continue_final_message)


def _merged(
    params: SamplingParams | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: str | Sequence[str] | None,
    ignore_eos: bool,
) -> SamplingParams:
    """The call's sampling options, given as one object or one by one."""
    given = SamplingParams(max_tokens, temperature, top_k, top_p, seed, () if stop is None else stop, ignore_eos)
    if params is None:
        return given
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
    if given != SamplingParams():
        raise ValueError("give params or single sampling options (max_tokens, temperature, …), not both")
    return params
