"""How answers look on the wire: chats with their calls and thoughts, and completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.serve.line import Piece
from spec_stack.types import AnswerPart, Metrics, TokenLogprobs

_FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Parts:
    """Takes answers apart.

    Parameters
    ----------
    parser : callable
        Makes a parser for one answer.
    token_bytes : callable
        Gives the bytes that a token adds to a text.
    max_calls : int, optional
        Most calls of an answer; later ones are left out.
    """

    parser: Callable[[], AnswerParser]
    token_bytes: Callable[[int], bytes]
    max_calls: int | None = None

    def token_text(self, token_id: int) -> str:
        """A token's text; half a character by its bytes, as OpenAI writes it, and an id without a text by its number.

        Parameters
        ----------
        token_id : int
            Any id of the model.
        """
        spelled = self.token_bytes(token_id)
        try:
            return spelled.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


@dataclass
class Choice:
    """One answer as it grows."""

    text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    metrics: Metrics | None = None
    parser: AnswerParser | None = None
    is_begun: bool = False


class Form:
    """Answers of one request.

    Parameters
    ----------
    model : str
        What they say they come from.
    num_choices : int
        How many there are.
    parts : Parts
        Take them apart.
    """

    prefix = "answer"

    def __init__(self, model: str, num_choices: int, parts: Parts) -> None:
        self._parts = parts
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.choices = [Choice() for _ in range(num_choices)]

    @property
    def is_complete(self) -> bool:
        """Return whether every answer has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def take(self, piece: Piece) -> Choice:
        """Take in a step."""
        choice, output = self.choices[piece.index], piece.output
        choice.text += output.text
        if output.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            choice.finish_reason, choice.metrics = _FINISHED[output.finish_reason], output.metrics
        return choice

    def usage(self) -> CompletionUsage:
        """Tokens in and out; a prompt counts once for all its answers."""
        costs = [choice.metrics for choice in self.choices if choice.metrics is not None]
        num_prompt, num_new = costs[0].num_prompt_tokens, sum(cost.num_tokens for cost in costs)
        return CompletionUsage(
            prompt_tokens=num_prompt,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=costs[0].num_cached_tokens),
        )

    def whole(self) -> BaseModel:
        """Return the answers in one piece."""
        raise NotImplementedError

    def pieces(self, piece: Piece) -> list[BaseModel]:
        """Return what a step sends."""
        raise NotImplementedError

    def last(self) -> BaseModel:
        """Return a piece that says only what it all cost."""
        raise NotImplementedError


class ChatForm(Form):
    """The form of answers to chats."""

    prefix = "chatcmpl"

    def take(self, piece: Piece) -> Choice:
        choice = super().take(piece)
        self._take_parts(choice, piece)
        return choice

    def _take_parts(self, choice: Choice, piece: Piece) -> list[AnswerPart]:
        """The parts that a step has made certain."""
        if choice.parser is None:
            choice.parser = self._parts.parser()
        found = choice.parser.push(piece.output.text)
        if choice.finish_reason is not None:
            found += choice.parser.flush()
        parts = []
        for part in found:
            if part.call is not None and len(choice.calls) == self._parts.max_calls:
                continue
            parts.append(part)
            if part.call is not None:
                choice.calls.append(part.call.as_dict())
            elif part.kind == "reasoning":
                choice.reasoning += part.text
            else:
                choice.content += part.text
        if choice.finish_reason == "stop" and choice.calls:
            choice.finish_reason = "tool_calls"
        return parts

    def whole(self) -> BaseModel:
        choices = [
            {
                "index": index,
                "finish_reason": choice.finish_reason,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice.logprobs),
            }
            for index, choice in enumerate(self.choices)
        ]
        return ChatCompletion.model_validate(
            self._head | {"object": "chat.completion", "choices": choices, "usage": self.usage()}
        )

    def _message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"tool_calls": choice.calls, "content": choice.content or None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return message

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "content": [
                self._token(it.token_id, it.logprob)
                | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in it.top]}
                for it in tokens
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._parts.token_text(token_id),
            "bytes": list(self._parts.token_bytes(token_id)),
            # JSON has no infinity; this is what OpenAI says of tokens that cannot come.
            "logprob": max(logprob, _LEAST_LOGPROB),
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: CompletionUsage | None = None) -> BaseModel:
        return ChatCompletionChunk.model_validate(
            self._head | {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
        )

    def pieces(self, piece: Piece) -> list[BaseModel]:
        choice = super().take(piece)
        deltas: list[dict[str, Any]] = []
        num_calls = len(choice.calls)
        for part in self._take_parts(choice, piece):
            deltas += _deltas(part, num_calls)
            num_calls += part.call is not None
        if not deltas and (choice.finish_reason is not None or piece.output.logprobs):
            deltas = [{}]
        if deltas and not choice.is_begun:
            choice.is_begun = True
            # Null while a text may still come, and for good beside a call; an answer of nothing is an empty text.
            content = "" if choice.finish_reason is not None and not choice.calls else None
            deltas[0] = {"role": "assistant", "content": content} | deltas[0]
        chunks: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        if chunks:
            chunks[-1] |= {
                "finish_reason": choice.finish_reason,
                "logprobs": self._logprobs(piece.output.logprobs),
            }
        return [self._chunk([chunk]) for chunk in chunks]

    def last(self) -> BaseModel:
        return self._chunk([], self.usage())


def _deltas(part: AnswerPart, num_calls: int) -> list[dict[str, Any]]:
    """Return what a part adds to a message that has so many calls: a call first names its tool, then its arguments."""
    if part.call is None:
        return [{"reasoning_content" if part.kind == "reasoning" else "content": part.text}]
    call = part.call.as_dict()
    named: dict[str, Any] = {**call, "index": num_calls, "function": {"name": part.call.name, "arguments": ""}}
    argued: dict[str, Any] = {"index": num_calls, "function": {"arguments": part.call.arguments}}
    return [{"tool_calls": [named]}, {"tool_calls": [argued]}]


class CompletionForm(Form):
    """The form of answers to completions, whose pieces look like the whole."""

    prefix = "cmpl"

    def _object(self, choices: list[dict[str, Any]], usage: CompletionUsage | None = None) -> BaseModel:
        return Completion.model_construct(**self._head, object="text_completion", choices=choices, usage=usage)

    def whole(self) -> BaseModel:
        choices = [
            {"index": index, "text": choice.text, "finish_reason": choice.finish_reason}
            | self._logprobs(choice.logprobs)
            for index, choice in enumerate(self.choices)
        ]
        return self._object(choices, self.usage())

    def pieces(self, piece: Piece) -> list[BaseModel]:
        choice, output = self.take(piece), piece.output
        if not output.text and choice.finish_reason is None and not output.logprobs:
            return []
        shown = {"index": piece.index, "text": output.text, "finish_reason": choice.finish_reason}
        return [self._object([shown | self._logprobs(output.logprobs)])]

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """The old form: lists side by side. Offsets are left out, for tokens need not be whole characters."""
        if tokens is None:
            return {"logprobs": None}
        text = self._parts.token_text
        return {
            "logprobs": {
                "tokens": [text(it.token_id) for it in tokens],
                "token_logprobs": [max(it.logprob, _LEAST_LOGPROB) for it in tokens],
                "top_logprobs": [self._by_text(it.top) for it in tokens],
            }
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by the tokens' texts; the second token of a text by its number."""
        named: dict[str, float] = {}
        for token_id, logprob in top:
            text = self._parts.token_text(token_id)
            named[f"token_id:{token_id}" if text in named else text] = max(logprob, _LEAST_LOGPROB)
        return named

    def last(self) -> BaseModel:
        return self._object([], self.usage())


FORMS: dict[str, type[Form]] = {"/v1/chat/completions": ChatForm, "/v1/completions": CompletionForm}
"""By path."""
