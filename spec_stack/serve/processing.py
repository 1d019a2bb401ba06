"""Request processing before the queue: parse, check, render, tokenize, compile the grammar."""

from __future__ import annotations

import inspect
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from spec_stack.hf.answer_parser import AnswerFormat, AnswerParser
from spec_stack.hf.prompt import EncodedPrompt, PromptSource, encode_prompt, special_tokens
from spec_stack.hf.structured import Grammars, structured_problem
from spec_stack.http.errors import MAX_NAME_CHARS, BadRequestError, first_problem
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.protocol import REQUESTS, ChatCompletionRequest, GenerationRequest, refuse_misspelt

# Escapes of JSON: of a backslash, of a character by two halves, or of half a character.
_HEX = rb"[0-9a-fA-F]{2}"
_SURROGATE = re.compile(rb"\\\\|\\u[dD][89abAB]_\\u[dD][c-fC-F]_|\\u[dD][89a-fA-F]_".replace(b"_", _HEX))


def _whole(escape: re.Match[bytes]) -> bytes:
    """U+FFFD in place of half a character, as `hf.prompt.readable`."""
    return b"\\ufffd" if len(escape[0]) == 6 else escape[0]


@dataclass(frozen=True)
class ProcessedRequest:
    """A request ready for the queue. parsers: one per choice. ignored: names of unknown fields."""

    encoded: EncodedPrompt
    options: Mapping[str, Any]
    parsers: Sequence[AnswerParser]
    max_calls: int | None
    streams: bool
    wants_usage: bool
    ignored: Sequence[str]


class RequestProcessor:
    """Processes request bodies with one tokenizer. end_ids: the target's end-of-sequence ids."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer, self._end_ids, self._vocab_size = tokenizer, end_ids, vocab_size
        self._format = AnswerFormat.learn(tokenizer)
        self._grammars = Grammars(tokenizer, vocab_size)
        if structured_problem() is None and tokenizer is not None and end_ids:
            # Requests that need an unsupported tokenizer's grammar report the error.
            with suppress(ValueError):
                self._grammars.warm_up()

    def process(self, path: str, body: bytes, config: ServeConfig) -> ProcessedRequest:
        """Process a body sent to a path. Raises BadRequestError."""
        try:
            return self._process(path, body, config)
        except ValidationError as error:
            raise first_problem(error) from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise BadRequestError(str(error)) from error

    def _process(self, path: str, body: bytes, config: ServeConfig) -> ProcessedRequest:
        request, ignored = self._validated(path, body, config)
        options, source = request.options(config), request.source()
        self._check_template_kwargs(source.chat_template_kwargs)
        if config.strip_special_tokens and source.messages is not None:
            special = list(special_tokens(self._tokenizer))
            stripped = [
                {**message, "content": _without(message.get("content"), special)} for message in source.messages
            ]
            source = replace(source, messages=stripped)
        encoded = encode_prompt(self._tokenizer, self._vocab_size, source)
        options["response_format"] = self._checked_format(request, source, encoded.text)
        return ProcessedRequest(
            encoded=encoded,
            options=options,
            parsers=[self._format.parser(source.tools, encoded.text) for _ in range(request.n)],
            max_calls=request.max_calls,
            streams=request.stream,
            wants_usage=bool(request.stream_options.get("include_usage")),
            ignored=ignored,
        )

    def _validated(self, path: str, body: bytes, config: ServeConfig) -> tuple[GenerationRequest, list[str]]:
        """The request and its ignored fields."""
        try:
            # Refuses NaN, and nesting of more than 200 levels.
            text = _SURROGATE.sub(_whole, body.removeprefix(BOM_UTF8))
            values = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"the body cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError("the body must be a JSON object")
        request = REQUESTS[path].model_validate(values)
        if request.model not in (None, config.model_name):
            raise BadRequestError(f"there is no model {request.model!r} here, only {config.model_name!r}", "model", 404)
        ignored = [name for name in values if name not in type(request).model_fields]
        if any(len(name) > MAX_NAME_CHARS for name in ignored):
            raise ValueError(f"the name of a field is over {MAX_NAME_CHARS} characters")
        refuse_misspelt(name for name in ignored if values[name] is not None)
        return request, ignored

    def _check_template_kwargs(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for tokenizer arguments, such as a template, among the template's variables."""
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters if given else ()
        if switches := [name for name in given if name in own]:
            raise ValueError(
                f"chat_template_kwargs: {', '.join(switches)} is not taken from requests, only the template's variables"
            )

    def _checked_format(self, request: GenerationRequest, source: PromptSource, rendered: str) -> object:
        """The response format or forced call, once it compiles for the request's end tokens as in `plan_request`."""
        choice = request.tool_choice if isinstance(request, ChatCompletionRequest) else None
        if (wanted := self._format.wanted(request.response_format, choice, source.tools)) is None:
            return None
        special = special_tokens(self._tokenizer)
        end_ids = {*(request.stop_token_ids or ()), *(special[text] for text in request.stop or () if text in special)}
        if not request.ignore_eos:
            end_ids |= self._end_ids
        self._grammars.compile(wanted, end_ids, 0, self._format.format_start(rendered))
        return wanted


def _without(value: Any, tokens: Sequence[str]) -> Any:
    """Messages without special tokens, including those formed by removing others."""
    match value:
        case list():
            return [_without(each, tokens) for each in value]
        case dict():
            return {name: _without(each, tokens) for name, each in value.items()}
        case str():
            while any(token in value for token in tokens):
                for token in tokens:
                    value = value.replace(token, "")
    return value
