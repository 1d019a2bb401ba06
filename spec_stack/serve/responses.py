"""OpenAI responses as JSON objects: completions, and chat completions with tool calls and reasoning."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.types import AnswerPart, Metrics, StepOutput, TokenLogprobs

REPORT = "spec_stack"
"""The field of `usage`, and of a stream's last chunk of each choice, that says what was pruned."""
_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}
# OpenAI's value for impossible tokens; JSON has no infinity.
_MIN_LOGPROB = -9999.0
Json = dict[str, Any]


@dataclass
class Choice:
    parser: AnswerParser
    content: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    metrics: Metrics | None = None
    is_begun: bool = False


class ResponseBuilder(ABC):
    """Builds a request's response, whole or in chunks.

    parsers: one per choice. token_bytes: a token's bytes by its id. max_calls: most tool calls of an answer. kind,
    chunk_kind: OpenAI's names of whole responses and of chunks.
    """

    id_prefix = kind = chunk_kind = ""

    def __init__(
        self,
        model: str,
        parsers: Sequence[AnswerParser],
        token_bytes: Callable[[int], bytes],
        max_calls: int | None = None,
    ) -> None:
        self._token_bytes, self._max_calls = token_bytes, max_calls
        self._head: Json = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.choices = [Choice(parser) for parser in parsers]

    def add(self, index: int, output: StepOutput) -> list[Json]:
        """Add a step of a choice, and return its stream chunks."""
        choice = self.choices[index]
        if output.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            choice.finish_reason, choice.metrics = _FINISH_REASONS[output.finish_reason], output.metrics
        chunks = [
            self._response(self.chunk_kind, [{"index": index} | part], None) for part in self._parts(choice, output)
        ]
        if choice.metrics is not None and chunks:
            chunks[-1][REPORT] = _report(choice.metrics)
        return chunks

    def usage_chunk(self) -> Json:
        """The chunk with only the usage."""
        return self._response(self.chunk_kind, [], self._usage())

    def whole(self) -> Json:
        """The complete response."""
        choices = [
            {"index": index, "finish_reason": choice.finish_reason} | self._whole_choice(choice)
            for index, choice in enumerate(self.choices)
        ]
        return self._response(self.kind, choices, self._usage())

    @abstractmethod
    def _parts(self, choice: Choice, output: StepOutput) -> list[Json]:
        """Add a step to a choice, and return the streamed parts."""

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Json:
        """A choice's own fields in the complete response."""

    def _response(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        return self._head | {"object": kind, "choices": choices, "usage": usage}

    def _usage(self) -> Json:
        """Token counts; the prompt counts once for all choices."""
        costs = [choice.metrics for choice in self.choices if choice.metrics is not None]
        num_prompt, num_new = costs[0].num_prompt_tokens, sum(cost.num_tokens for cost in costs)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": costs[0].num_cached_tokens},
            REPORT: _report(costs[0]),
        }

    def _token_text(self, token_id: int) -> str:
        """A token's text; OpenAI's byte form for partial characters, the id for a token without text."""
        spelled = self._token_bytes(token_id)
        try:
            return spelled.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _report(metrics: Metrics) -> Json:
    """What was pruned, in tokens, and why."""
    return {
        "reason": metrics.sparse_prefill_reason,
        "prompt_tokens": metrics.num_prompt_tokens,
        "kept_tokens": metrics.num_kept_tokens,
        "recalled_tokens": metrics.num_recalled_tokens,
    }


class ChatResponseBuilder(ResponseBuilder):
    """Builds chat completions."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"tool_calls": choice.calls, "content": choice.content or None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {"message": message, "logprobs": self._logprobs(choice.logprobs)}

    def _parts(self, choice: Choice, output: StepOutput) -> list[Json]:
        is_end = choice.finish_reason is not None
        parsed = choice.parser.push(output.text) + (choice.parser.flush() if is_end else [])
        deltas = [delta for part in parsed for delta in self._deltas(choice, part)]
        if choice.finish_reason == "stop" and choice.calls:
            choice.finish_reason = "tool_calls"
        if not deltas and not is_end and not output.logprobs:
            return []
        deltas = deltas or [{}]
        if not choice.is_begun:
            choice.is_begun = True
            # Null while text may follow, and beside a call; an empty answer is an empty string.
            deltas[0] = {"role": "assistant", "content": "" if is_end and not choice.calls else None} | deltas[0]
        parts: list[Json] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        parts[-1] |= {"finish_reason": choice.finish_reason, "logprobs": self._logprobs(output.logprobs)}
        return parts

    def _deltas(self, choice: Choice, part: AnswerPart) -> list[Json]:
        """Add a part to the message; a call streams its name, then its arguments."""
        if part.kind == "reasoning":
            choice.reasoning += part.text
            return [{"reasoning_content": part.text}]
        if part.call is None:
            choice.content += part.text
            return [{"content": part.text}]
        index, call = len(choice.calls), part.call.as_dict()
        if index == self._max_calls:
            return []
        choice.calls.append(call)
        name = call | {"index": index, "function": {"name": part.call.name, "arguments": ""}}
        arguments = {"index": index, "function": {"arguments": part.call.arguments}}
        return [{"tool_calls": [name]}, {"tool_calls": [arguments]}]

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
        if tokens is None:
            return None
        content = [
            self._token(it.token_id, it.logprob) | {"top_logprobs": [self._token(*each) for each in it.top]}
            for it in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token_id),
            "bytes": list(self._token_bytes(token_id)),
            "logprob": max(logprob, _MIN_LOGPROB),
        }


class CompletionResponseBuilder(ResponseBuilder):
    """Builds completions, whose chunks have the format of the whole."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: Choice) -> Json:
        return {"text": choice.content} | self._logprobs(choice.logprobs)

    def _parts(self, choice: Choice, output: StepOutput) -> list[Json]:
        choice.content += output.text
        if not output.text and choice.finish_reason is None and not output.logprobs:
            return []
        return [{"text": output.text, "finish_reason": choice.finish_reason} | self._logprobs(output.logprobs)]

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> Json:
        """Parallel lists, without offsets: a token may be part of a character."""
        if tokens is None:
            return {"logprobs": None}
        return {
            "logprobs": {
                "tokens": [self._token_text(it.token_id) for it in tokens],
                "token_logprobs": [max(it.logprob, _MIN_LOGPROB) for it in tokens],
                "top_logprobs": [self._by_text(it.top) for it in tokens],
            }
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by text; further tokens with the same text by id."""
        named: dict[str, float] = {}
        for token_id, logprob in top:
            text = self._token_text(token_id)
            named[f"token_id:{token_id}" if text in named else text] = max(logprob, _MIN_LOGPROB)
        return named


BUILDERS: dict[str, type[ResponseBuilder]] = {
    "/v1/chat/completions": ChatResponseBuilder,
    "/v1/completions": CompletionResponseBuilder,
}
"""By path."""
