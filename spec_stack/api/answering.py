"""Answer calls: generate and stream, alike for a generator and for a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from spec_stack.api.streaming import Streamer, awaitable, awaitable_result, feed
from spec_stack.api.unknown_options import parameters_of, refuses_unknown_options
from spec_stack.config import SamplingParams, SparsePrefill, check_samples
from spec_stack.controller.base import Policy
from spec_stack.engine.progress import OnProgress, Stream
from spec_stack.engine.request import CallOptions, Request
from spec_stack.hf.answer_parser import parse_answer
from spec_stack.hf.processors import CannotCopyError, Processor, check_processors, copy_processor
from spec_stack.hf.prompt import EncodedPrompt, Message, PromptSource, Span, unpadded
from spec_stack.offline.records import add_records, check_record_path
from spec_stack.types import GenerationResult, StepOutput


class Answering(ABC):
    """Has `generate` and `stream`; how a call is planned and run is its own."""

    @abstractmethod
    def _plan(self, call: Call) -> Request:
        """Check a call, and settle what is done for it."""

    @abstractmethod
    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        """Make the request's steps."""

    @abstractmethod
    def _sample(self, calls: Sequence[Call]) -> list[GenerationResult]:
        """Answer calls with the same prompt: the first prefills it, the others go on from copies of its caches."""

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
        tool_choice: str | Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        params: SamplingParams | None = None,
        max_tokens: int | None = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        min_p: float = SamplingParams.min_p,
        repetition_penalty: float = SamplingParams.repetition_penalty,
        bad_words_ids: Sequence[Sequence[int]] = SamplingParams.bad_words_ids,
        logit_bias: Mapping[int, float] | None = SamplingParams.logit_bias,
        min_tokens: int = SamplingParams.min_tokens,
        stop_token_ids: Sequence[int] = SamplingParams.stop_token_ids,
        sampling: str | None = None,
        logits_processor: Processor | Sequence[Processor] | None = None,
        response_format: Mapping[str, Any] | type | None = None,
        logprobs: int | None = None,
        keep_rate: float | None = None,
        sparse_prefill: SparsePrefill | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        proposer: str | None = None,
        request_id: str | None = None,
        task: str = "",
        on_progress: OnProgress | None = None,
        n: int = 1,
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
            a list of parts of the type "text"; a template gets the form that it takes, and parts are joined by line
            breaks for one that takes texts. An assistant's content may be missing beside its `tool_calls`. System
            messages and the template's own tokens are never pruned.
        input_ids : sequence of int or torch.Tensor, optional
            Token ids (N,) or (1, N) of the target.
        attention_mask : sequence of int or torch.Tensor, optional
            Of the shape of `input_ids`, so that what a tokenizer returns can be handed on; tokens at either end for
            which it is 0 are padding, and left out.
        protected : sequence of (int, int), optional
            Half-open spans that are never pruned: of tokens beside `input_ids`, of characters beside `prompt`.
        tools, documents : sequence, optional
            Handed to the chat template, which writes them into the prompt, where they are never pruned.
        tool_choice : str or mapping, optional
            OpenAI's: "auto" (as None), "none", "required" or `{"type": "function", "function": {"name": ...}}`. The
            last two make the answer one call of a tool, by the extra `structured`; `result.tool_calls` has the calls.
        chat_template_kwargs : mapping, optional
            More for the chat template, `{"enable_thinking": False}` say.
        continue_final_message : bool
            Go on with the text of the last message, instead of beginning an answer to it.
        params : SamplingParams, optional
            The options from max_tokens to stop_token_ids as one object, in their place.
        max_tokens : int, optional
            Most tokens to generate; None is 256, or what the models have positions left for.
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
            Strings that end the text; they are not part of it. One that is a special token ends it as that token.
        ignore_eos : bool
            Go on past the end-of-sequence token (for benchmarks).
        min_p : float
            Draw among the tokens with this share of the likeliest one's probability or more; 0 is off.
        repetition_penalty : float
            How much less likely a token is that the prompt or the text has already, over 0; 1.0 is off.
        bad_words_ids : sequence of sequence of int
            Sequences of token ids that are never completed.
        logit_bias : mapping of int to float, optional
            What is added to the logits of single token ids.
        min_tokens : int
            Tokens before which no token may end the text.
        stop_token_ids : sequence of int
            Token ids that end the text beside the model's own, also under ignore_eos; they are not part of it.
        sampling : "model", optional
            Take what the checkpoint's own generation config sets for options that are at their defaults.
        logits_processor : callable or sequence of callable, optional
            transformers' processors, or any callable over (input_ids (1, n), scores (1, vocab)) that returns scores.
            They see the whole prompt, also where it was pruned, and go over the draft's rows as well (see
            docs/generation-options.md for those that keep a state).
        response_format : mapping or class, optional
            What the answer has to be: `{"type": "json_schema", "json_schema": {"schema": ...}}`, a class with
            `model_json_schema` (pydantic's), `{"type": "json_object"}`, `{"type": "regex", "pattern": ...}` or
            `{"type": "grammar", "grammar": ...}` (EBNF, rule root). Needs the extra `structured`.
        logprobs : int, optional
            Give every token's log-probability, and that many of the likeliest tokens beside it.
        keep_rate : float, optional
            Share of the prompt, in a session of its new text, that the target prefills, over 0 to 1; None is the
            configuration's.
        sparse_prefill : {"auto", "on", "off", "draft_only"}, optional
            "auto" prunes the prompt, in a session its new text, from `PrefillConfig.min_prompt_tokens` tokens on; "on"
            whatever its length; "off" prefills it whole; with "draft_only" the target prefills it whole too, and the
            draft decodes over `draft_slots` of it. None is the configuration's.
        policy : str or Policy, optional
            What chooses gamma, the number of tokens drafted in a step; None is the generator's.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        proposer : str, optional
            Who proposes: "model", "lookup", "both" or "auto" (see `DecodeConfig`); None is the generator's.
        request_id, task : str, optional
            Labels of the records.
        on_progress : callable, optional
            Called with (num_done, num_total, phase) after every chunk of a prefill, in tokens; the phase is "scoring"
            (the draft's) or "prefill" (the target's). What it raises ends the call.
        n : int
            Samples of the prompt, which is prefilled once for all of them: `result.choices`. Sample i is drawn with
            seed + i.
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
            token_ids, text, finish_reason ("eos", "stop" or "length"), metrics, records, logprobs, choices; of a chat,
            text taken apart: content, reasoning, tool_calls.

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
        if not isinstance(return_records, bool):
            raise ValueError(f"return_records must be True or False, got {return_records!r}")
        if records is not None:
            if not isinstance(records, str | Path):
                raise ValueError(f"records must be the path of a .jsonl file, got {records!r}")
            check_record_path(records, request_id)
        call = Call.of(
            PromptSource(
                prompt=prompt,
                messages=messages,
                input_ids=unpadded(input_ids, attention_mask),
                protected=protected,
                tools=None if isinstance(tool_choice, str) and tool_choice == "none" else tools,
                documents=documents,
                chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
                continue_final_message=continue_final_message,
            ),
            params,
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=SamplingParams.stop if stop is None else stop,
                ignore_eos=ignore_eos,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                bad_words_ids=bad_words_ids,
                logit_bias=logit_bias,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
            ),
            CallOptions(
                keep_rate=keep_rate,
                sparse_prefill=sparse_prefill,
                policy=policy,
                gamma=gamma,
                proposer=proposer,
                request_id=request_id,
                task=task,
                logits_processor=logits_processor,
                response_format=response_format,
                tool_choice=tool_choice,
                logprobs=logprobs,
                sampling=sampling,
                on_progress=on_progress,
            ),
        )
        request = self._plan(call)
        check_samples(n, request.params.temperature)
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ValueError(f"streamer must have put() and end(), as those of transformers do, got {streamer!r}")
        if n > 1 and streamer is not None:
            raise ValueError("a streamer takes one answer; leave out n, or the streamer")
        results = self._sample(call.samples(n)) if n > 1 else [self._collect(request, streamer)]
        if records is not None:
            add_records([step for result in results for step in result.records or []], records)
        if not return_records:
            results = [replace(result, records=None) for result in results]
        return replace(results[0], others=results[1:])

    def _collect(self, request: Request, streamer: Streamer | None = None) -> GenerationResult:
        """A request's whole stream, with its records."""
        running = Stream(self._run(request), request.progress)
        outputs = list(running if streamer is None else feed(streamer, request.prompt_ids, running))
        last = outputs[-1]
        if last.finish_reason is None or last.metrics is None:
            raise RuntimeError("the stream ended without a last step")
        logprobs = None
        if request.num_logprobs is not None:
            logprobs = [each for output in outputs for each in output.logprobs or []]
        text = "".join(output.text for output in outputs)
        content, reasoning, calls = (text, "", []) if request.parser is None else parse_answer(request.parser, text)
        return GenerationResult(
            token_ids=[token_id for output in outputs for token_id in output.token_ids],
            text=text,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            records=[output.record for output in outputs],
            logprobs=logprobs,
        )

    @parameters_of(generate)
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
        tool_choice: str | Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        params: SamplingParams | None = None,
        max_tokens: int | None = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        min_p: float = SamplingParams.min_p,
        repetition_penalty: float = SamplingParams.repetition_penalty,
        bad_words_ids: Sequence[Sequence[int]] = SamplingParams.bad_words_ids,
        logit_bias: Mapping[int, float] | None = SamplingParams.logit_bias,
        min_tokens: int = SamplingParams.min_tokens,
        stop_token_ids: Sequence[int] = SamplingParams.stop_token_ids,
        sampling: str | None = None,
        logits_processor: Processor | Sequence[Processor] | None = None,
        response_format: Mapping[str, Any] | type | None = None,
        logprobs: int | None = None,
        keep_rate: float | None = None,
        sparse_prefill: SparsePrefill | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        proposer: str | None = None,
        request_id: str | None = None,
        task: str = "",
        on_progress: OnProgress | None = None,
    ) -> Generator[StepOutput, None, None]:
        """Answer or continue a prompt, step by step.

        The arguments are checked before this returns; the work begins with the first `next`. They are those of
        `generate`, but for n, return_records, records and streamer.

        Returns
        -------
        generator of StepOutput
            One per step, as soon as it is there; the last carries finish_reason and metrics, whose durations count from
            the call, without the time that the caller lets pass before or between steps. `close` ends it at any time,
            a prefill after its next chunk, also from another thread.

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
        call = Call.of(
            PromptSource(
                prompt=prompt,
                messages=messages,
                input_ids=unpadded(input_ids, attention_mask),
                protected=protected,
                tools=None if isinstance(tool_choice, str) and tool_choice == "none" else tools,
                documents=documents,
                chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
                continue_final_message=continue_final_message,
            ),
            params,
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=SamplingParams.stop if stop is None else stop,
                ignore_eos=ignore_eos,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                bad_words_ids=bad_words_ids,
                logit_bias=logit_bias,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
            ),
            CallOptions(
                keep_rate=keep_rate,
                sparse_prefill=sparse_prefill,
                policy=policy,
                gamma=gamma,
                proposer=proposer,
                request_id=request_id,
                task=task,
                logits_processor=logits_processor,
                response_format=response_format,
                tool_choice=tool_choice,
                logprobs=logprobs,
                sampling=sampling,
                on_progress=on_progress,
            ),
        )
        request = self._plan(call)
        return Stream(self._run(request), request.progress)

    def stream_call(self, call: Call) -> Generator[StepOutput, None, None]:
        """`stream` of a call that was put together before. Raises ValueError as that does."""
        request = self._plan(call)
        return Stream(self._run(request), request.progress)

    agenerate = awaitable_result(generate)
    """`generate` for code that awaits: `await generator.agenerate(...)`. The answer is made in a thread."""

    astream = awaitable(stream)
    """`stream` for code that awaits: `async for output in generator.astream(...)`. The steps are made in a thread."""


@dataclass(frozen=True)
class Call:
    """A call, checked and put together, as `_plan` takes it."""

    source: PromptSource
    params: SamplingParams
    options: CallOptions

    @classmethod
    def of(
        cls, source: PromptSource, params: SamplingParams | None, single: SamplingParams, options: CallOptions
    ) -> Call:
        """Put a call together. Its sampling options come as one object, params, or one by one, single.

        Raises ValueError where they come both ways.
        """
        if params is None:
            return cls(source, single, options)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
        if single != SamplingParams():
            raise ValueError("give params or single sampling options (max_tokens, temperature, …), not both")
        return cls(source, params, options)

    @classmethod
    def over(cls, encoded: EncodedPrompt, options: Mapping[str, Any]) -> Call:
        """Put together a call over a prompt that was encoded before.

        Parameters
        ----------
        encoded : EncodedPrompt
            The prompt.
        options : mapping
            Options of `stream` by name, but for those of the prompt and `params`.

        Raises
        ------
        ValueError
            For a value that cannot be used.
        TypeError
            For an unknown option.
        """
        drawn = {entry.name for entry in fields(SamplingParams)}
        sampling = {name: value for name, value in options.items() if name in drawn}
        rest = {name: value for name, value in options.items() if name not in drawn}
        return cls(PromptSource(encoded=encoded), SamplingParams(**sampling), CallOptions(**rest))

    def samples(self, n: int) -> list[Call]:
        """The call n times: with seeds in a row, names of their own, and processors that know nothing of each other.

        Raises ValueError for a processor that cannot be copied.
        """
        calls = []
        for index in range(n):
            options, params = self.options, self.params
            if index:
                options = replace(options, logits_processor=self._fresh_processors())
            if self.options.request_id is not None:
                options = replace(options, request_id=f"{self.options.request_id}-{index}")
            if params.seed is not None:
                params = replace(params, seed=(params.seed + index) % (1 << 63))
            calls.append(Call(self.source, params, options))
        return calls

    def _fresh_processors(self) -> list[Processor]:
        try:
            return [copy_processor(processor) for processor in check_processors(self.options.logits_processor)]
        except CannotCopyError as error:
            raise ValueError(
                f"n samples need a copy each of every logits processor, and one cannot be copied ({error}): give it a "
                "method copy(), or a true attribute `stateless` where it keeps nothing"
            ) from error
