"""`generate` and `stream`, shared by the generator and sessions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack, cast, overload

import torch
from transformers.generation.streamers import BaseStreamer

from spec_stack.api.unknown_options import shows_options, unknown_option
from spec_stack.config import SamplingParams, check_samples
from spec_stack.engine.progress import Stream
from spec_stack.engine.request import Call, GenerateOptions, Request
from spec_stack.hf.answer_parser import parse_answer
from spec_stack.hf.processors import check_processors, is_shareable, name_of
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.records import add_records, check_record_path
from spec_stack.types import GenerationResult, StepOutput

_DEFAULTS: dict[str, Any] = {
    **{entry.name: getattr(SamplingParams, entry.name) for entry in fields(SamplingParams)},
    **{"stop": None, "protected": (), "continue_final_message": False, "task": "", "explain": False},
}


class AnswerOptions(GenerateOptions, total=False):
    """The keywords of `generate`: those of `stream` and those of a whole answer."""

    n: int
    return_records: bool
    records: str | Path | None
    streamer: BaseStreamer | None


class GenerationMixin(ABC):
    """`generate` and `stream` of planned requests."""

    @abstractmethod
    def _begin(self, call: Call) -> tuple[Request, Generator[StepOutput, None, None]]:
        """Check a call and plan its request; the generator runs it step by step."""

    @abstractmethod
    def _sample(self, calls: Sequence[Call]) -> list[GenerationResult]:
        """Answer calls with the same prompt; all but the first continue from copies of its caches."""

    @overload
    def generate(self, prompt: str | None = None, **options: Unpack[AnswerOptions]) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[AnswerOptions]
    ) -> list[GenerationResult]: ...

    @shows_options(AnswerOptions, **_DEFAULTS, n=1, return_records=False)
    def generate(
        self, prompt: str | list[str] | tuple[str, ...] | None = None, **options: Unpack[AnswerOptions]
    ) -> GenerationResult | list[GenerationResult]:
        """Answer or continue a prompt, or several in turn.

        Exactly one of `prompt`, `messages` and `input_ids` is given. A list of prompts gives a list of results; all are
        checked before the first is answered, and `on_progress` is told of each as (num_done, num_total, "prompts").

        Parameters
        ----------
        prompt : str, optional
            A text to continue.
        messages : sequence of mapping, optional
            A chat, `{"role": ..., "content": ...}` each, rendered by the tokenizer's template. A content is a text, or
            a list of parts of type "text", converted to the format that the template accepts (parts are joined by line
            breaks). An assistant's content may be missing beside its `tool_calls`. System messages, the
            assistant's and the template's own tokens are never pruned.
        input_ids : sequence of int or torch.Tensor, optional
            Token ids (N,) or (1, N) of the target.
        attention_mask : sequence of int or torch.Tensor, optional
            Mask of the shape of `input_ids`, as tokenizers return it; tokens at either end with mask 0 are padding and
            removed.
        protected : sequence of (int, int), optional
            Half-open spans that are never pruned: token spans with `input_ids`, character spans with `prompt`.
        question : str, optional
            The question about the prompt, wherever it is in it, or not in it at all; it then finds what is kept, and
            the target does not read it. None finds the question.
        tools, documents : sequence, optional
            Passed to the chat template, which writes them into the prompt; never pruned.
        tool_choice : str or mapping, optional
            "auto" (as None), "none", "required", a tool's name, or OpenAI's `{"type": "function", "function": {"name":
            ...}}`. The last three make the answer one call of a tool, by the extra `structured`; `result.tool_calls`
            has the calls.
        chat_template_kwargs : mapping, optional
            Further template variables, e.g. `{"enable_thinking": False}`.
        continue_final_message : bool
            Continue the text of the last message instead of answering it.
        params : SamplingParams, optional
            The following options as one object, instead of them.
        max_tokens, min_tokens, max_time, ignore_eos, stop, stop_token_ids, temperature, top_k, top_p, min_p : optional
            As in `SamplingParams`.
        seed, repetition_penalty, bad_words_ids, logit_bias : optional
            As in `SamplingParams`.
        sampling : "model", optional
            Use the checkpoint's generation config for options at their defaults.
        logits_processor : callable or sequence of callable, optional
            transformers' processors, or any callable over (input_ids (1, n), scores (1, vocab)) that returns scores.
            They see the whole prompt, even if pruned, and apply to the draft's rows too (see
            docs/options.md for stateful ones).
        response_format : mapping or class, optional
            The answer's format: `{"type": "json_schema", "json_schema": {"schema": ...}}`, a class with
            `model_json_schema` (pydantic's), `{"type": "json_object"}`, `{"type": "regex", "pattern": ...}` or
            `{"type": "grammar", "grammar": ...}` (EBNF, rule root). Needs the extra `structured`.
        logprobs : int, optional
            Return every token's log-probability, and those of this many most likely tokens.
        keep_rate, sparse_prefill : optional
            As in `PrefillConfig`; in a session of the new text. None is the configuration's.
        max_dropped_attention : float, optional
            The draft's check of the pruned prompt, as in `PrefillConfig`. None is the configuration's.
        policy, proposer : optional
            As in `DecodeConfig`, or a Policy; None is the generator's. In a seeded call a named one starts untrained.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        request_id, task : str, optional
            Labels of the records.
        on_progress : callable, optional
            Called with (num_done, num_total, phase) after every chunk of a prefill, in tokens; the phase is "scoring"
            (the draft's) or "prefill" (the target's). An exception ends the call.
        explain : bool
            Tell which parts of the prompt were kept, and what kept each: `result.explanation`.
        n : int
            Samples of the prompt, which is prefilled once for all of them: `result.choices`. Sample i is drawn with
            seed + i.
        return_records : bool
            Keep one StepRecord per step in the result.
        records : str or Path, optional
            Append the records to this .jsonl file, created if missing (`spec_stack.records`).
        streamer : optional
            A transformers streamer (e.g. `TextStreamer`), which gets the prompt, then every step's tokens, then the
            end.

        Returns
        -------
        GenerationResult
            token_ids, text, finish_reason ("eos", "stop", "length" or "time"), metrics, records, logprobs, choices; of
            a chat, parts of the text: content, reasoning, tool_calls.

        Raises
        ------
        ValueError
            For an invalid value, before any work; the message says what to change.
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
        for unknown in options.keys() - AnswerOptions.__annotations__.keys():
            raise unknown_option(GenerationMixin.generate, unknown)
        if isinstance(prompt, list | tuple):
            return self._generate_each(prompt, options)
        call = cast(Call, {**options, "prompt": prompt})
        return self._answer(call, options, self._begin(call))

    def _answer(
        self, call: Call, options: AnswerOptions, planned: tuple[Request, Generator[StepOutput, None, None]]
    ) -> GenerationResult:
        keeps_records, path, streamer = _whole_answer(options)
        n = options.get("n", 1)
        check_samples(n, planned[0].params.temperature)
        if n > 1 and streamer is not None:
            raise ValueError("a streamer takes one answer; leave out n, or the streamer")
        results = self._sample(samples(call, n)) if n > 1 else [collect(*planned, streamer)]
        if path is not None:
            add_records([step for result in results for step in result.records or []], path)
        if not keeps_records:
            results = [replace(result, records=None) for result in results]
        # Samples share one prefill.
        others = [replace(result, explanation=results[0].explanation) for result in results[1:]]
        return replace(results[0], others=others)

    def _generate_each(self, prompts: Sequence[str], options: AnswerOptions) -> list[GenerationResult]:
        if not prompts:
            raise ValueError("the list of prompts is empty; give at least one")
        calls = [cast(Call, {**options, "prompt": prompt}) for prompt in prompts]
        # All of them are checked before the first is answered.
        planned, results = [self._begin(call) for call in calls], []
        for call, each in zip(calls, planned, strict=True):
            results.append(self._answer(call, options, each))
            if (tell := options.get("on_progress")) is not None:
                tell(len(results), len(prompts), "prompts")
        return results

    @shows_options(GenerateOptions, **_DEFAULTS)
    async def agenerate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """`generate` for code that awaits, with the options of `stream`. Steps are made in a thread; a cancelled call
        ends after its current step."""
        for unknown in options.keys() - GenerateOptions.__annotations__.keys():
            raise unknown_option(GenerationMixin.agenerate, unknown)
        request, steps = self._begin(cast(Call, {**options, "prompt": prompt}))
        outputs = [output async for output in _in_thread(Stream(steps, request.progress))]
        return replace(_whole(request, outputs), records=None)

    @shows_options(GenerateOptions, **_DEFAULTS)
    def stream(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[StepOutput, None, None]:
        """Answer or continue a prompt, step by step.

        Arguments are checked before this returns; work starts with the first `next`. They are those of `generate`,
        which documents them, except n, return_records, records and streamer.

        Returns
        -------
        generator of StepOutput
            One per step; the last has finish_reason and metrics, whose durations start at the call and exclude the
            caller's pauses. `close` ends the stream at any time, also from another thread; a prefill ends after its
            current chunk.

        Raises
        ------
        ValueError
            For an invalid value; the message says what to change.
        TypeError
            For an unknown option; the message names the nearest one.

        Examples
        --------
        >>> from spec_stack import SpecStackGenerator
        >>> generator = SpecStackGenerator.from_pretrained()
        >>> sum(len(output.token_ids) for output in generator.stream("def main():", max_tokens=8))
        8
        """
        return self._stream(options, prompt=prompt)

    def stream_encoded(self, encoded: EncodedPrompt, options: Mapping[str, Any]) -> Generator[StepOutput, None, None]:
        """`stream` of an encoded prompt. Raises ValueError and TypeError as `stream`."""
        return self._stream(options, encoded=encoded)

    def _stream(self, options: Mapping[str, Any], **source: Any) -> Generator[StepOutput, None, None]:
        for unknown in options.keys() - GenerateOptions.__annotations__.keys():
            raise unknown_option(GenerationMixin.stream, unknown)
        request, steps = self._begin(cast(Call, {**options, **source}))
        return Stream(steps, request.progress)

    @shows_options(GenerateOptions, **_DEFAULTS)
    def astream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerator[StepOutput]:
        """`stream` for code that awaits: `async for output in generator.astream(...)`. Steps are made in a thread."""
        return _in_thread(self.stream(prompt, **options))


def _feed(streamer: BaseStreamer, prompt_ids: Sequence[int], outputs: Iterator[StepOutput]) -> Generator[StepOutput]:
    """Yield the steps, each after it was put into the streamer. The streamer gets the prompt first, as from
    `model.generate`, and `end` is always called."""
    try:
        streamer.put(torch.tensor([list(prompt_ids)]))
        for output in outputs:
            if output.token_ids:
                streamer.put(torch.tensor(output.token_ids))
            yield output
    finally:
        # The reader of a TextIteratorStreamer waits in another thread, also after an error.
        streamer.end()


async def _in_thread(items: Generator[StepOutput]) -> AsyncGenerator[StepOutput]:
    """The items, each made in a thread; a cancelled loop closes the generator."""
    is_over = False

    def step() -> StepOutput | None:
        """The next item. A future cannot carry StopIteration."""
        try:
            return next(items, None)
        finally:
            if is_over:
                items.close()

    try:
        while (item := await asyncio.to_thread(step)) is not None:
            yield item
    finally:
        # A cancelled `await` does not stop the running step: this tells it to end, and it closes the generator.
        is_over = True
        items.close()


def collect(
    request: Request, steps: Generator[StepOutput, None, None], streamer: BaseStreamer | None = None
) -> GenerationResult:
    """Drain a request's steps, and keep its records."""
    running = Stream(steps, request.progress)
    return _whole(request, list(running if streamer is None else _feed(streamer, request.prompt_ids, running)))


def _whole(request: Request, outputs: Sequence[StepOutput]) -> GenerationResult:
    """The answer of all steps."""
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
        explanation=last.explanation,
    )


def samples(call: Mapping[str, Any], n: int) -> list[Call]:
    """n calls with consecutive seeds and separate request ids. Raises ValueError for a processor that several samples
    cannot share."""
    stateful = [name_of(each) for each in check_processors(call.get("logits_processor")) if not is_shareable(each)]
    if n > 1 and stateful:
        raise ValueError(
            f"n samples cannot share {', '.join(stateful)}, which may keep state: call generate once for each sample, "
            "or give it a true attribute `stateless` where it keeps nothing"
        )
    calls = []
    for index in range(n):
        own = dict(call)
        if call.get("request_id") is not None:
            own["request_id"] = f"{call['request_id']}-{index}"
        if call.get("seed") not in (None, -1):
            own["seed"] = _next_seed(call["seed"], index)
        params = call.get("params")
        if params is not None and params.seed is not None:
            own["params"] = replace(params, seed=_next_seed(params.seed, index))
        calls.append(cast(Call, own))
    return calls


def _next_seed(seed: int, index: int) -> int:
    return (int(seed) + index) % (1 << 63)


def _whole_answer(options: AnswerOptions) -> tuple[bool, str | Path | None, BaseStreamer | None]:
    """return_records, records and streamer of a call. Raises ValueError for invalid values."""
    keeps, path, streamer = options.get("return_records", False), options.get("records"), options.get("streamer")
    if not isinstance(keeps, bool):
        raise ValueError(f"return_records must be True or False, got {keeps!r}")
    if path is not None:
        if not isinstance(path, str | Path):
            raise ValueError(f"records must be the path of a .jsonl file, got {path!r}")
        check_record_path(path)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(f"streamer must have put() and end(), as those of transformers do, got {streamer!r}")
    return keeps, path, streamer
