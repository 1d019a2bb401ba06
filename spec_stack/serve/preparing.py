"""Everything that is done with a body before its request waits: parsed, checked, rendered, tokenized, compiled."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from spec_stack.hf.answer_format import AnswerFormat, ForcedCall, tool_names
from spec_stack.hf.prompt import EncodedPrompt, PromptSource, encode_prompt, special_tokens
from spec_stack.hf.structured import Grammars, SerializedFormat
from spec_stack.serve.bodies import BODIES, Body, ChatBody
from spec_stack.serve.bounds import Bounds
from spec_stack.serve.config import ServeConfig


class Refused(Exception):  # noqa: N818 - a state, no mistake of anybody's
    """The client can change it.

    Parameters
    ----------
    message : str
        What to change.
    param : str, optional
        The field.
    status : int
        Of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, param, status)
        self.message, self.param, self.status = message, param, status


@dataclass(frozen=True)
class Settings:
    """The settings of encoding prompts: the target's tokenizer, its rows, and the tokens that end its texts."""

    tokenizer: Any
    vocab_size: int
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Prepared:
    """A request.

    Parameters
    ----------
    encoded : EncodedPrompt
        Its prompt.
    options : mapping
        Options of `stream` beside the prompt and the number of tokens.
    max_tokens : int or None
        Most tokens asked for, if it says.
    num_choices : int
        Answers asked for.
    streams, wants_usage : bool
        Whether it is answered in pieces, and whether these end with what it cost.
    ignored : sequence of str
        Fields that have no meaning here.
    tool_names : sequence of str
        Tools that its answer may call.
    in_thought : bool
        Whether its prompt ends with the beginning of a thought.
    """

    encoded: EncodedPrompt
    options: Mapping[str, Any]
    max_tokens: int | None
    num_choices: int
    streams: bool
    wants_usage: bool
    ignored: Sequence[str]
    tool_names: Sequence[str]
    in_thought: bool


class Preparing:
    """Prepares bodies.

    Parameters
    ----------
    settings : Settings
        What prompts are encoded with.
    grammars : Grammars
        Compiles.
    answer_format : AnswerFormat
        How the template writes calls.
    """

    def __init__(self, settings: Settings, grammars: Grammars, answer_format: AnswerFormat) -> None:
        self._settings, self._grammars, self._format = settings, grammars, answer_format

    def prepare(self, path: str, content: bytes, config: ServeConfig) -> Prepared:
        """Return what a body asks for.

        Parameters
        ----------
        path : str
            What it was sent to, one of `bodies.BODIES`.
        content : bytes
            The body.
        config : ServeConfig
            What the server takes.

        Raises
        ------
        Refused
            For what the client can change.
        """
        try:
            return self._prepare(path, content, config)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Refused(f"{where}: {first['msg']}" if where else first["msg"], where or None) from error
        except RecursionError as error:
            raise Refused("the request is nested deeper than this server takes") from error
        except (ValueError, TypeError, OverflowError) as error:
            raise Refused(str(error)) from error

    def _prepare(self, path: str, content: bytes, config: ServeConfig) -> Prepared:
        try:
            values = json.loads(content)
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError("the body must be a JSON object")
        Bounds(config.max_prompt_chars or len(content), config.max_grammar_size).check(values)
        body = BODIES[path].model_validate(values)
        if body.model not in (None, config.model_name):
            raise Refused(f"there is no model {body.model!r} here, only {config.model_name!r}", "model", 404)
        ignored = [name for name in values if name not in type(body).model_fields]
        if ignored and config.strict:
            raise Refused(f"{', '.join(ignored)}: not known; leave it out", ignored[0])
        options, source = body.options(config), body.source()
        self._check_switches(source.chat_template_kwargs, config)
        if config.strip_special_tokens and source.messages is not None:
            source = replace(source, messages=[self._stripped(message) for message in source.messages])
        encoded = encode_prompt(self._settings.tokenizer, self._settings.vocab_size, source)
        in_thought = self._format.begins_in_thought(encoded.text)
        wanted = self._forced(body, source) or options.pop("response_format", None)
        if wanted is not None:
            options["response_format"] = self._compiled(wanted, options, in_thought)
        return Prepared(
            encoded=encoded,
            options=options,
            max_tokens=body.limit(),
            num_choices=body.n,
            streams=body.stream,
            wants_usage=body.wants_usage,
            ignored=ignored,
            tool_names=tool_names(source.tools),
            in_thought=in_thought,
        )

    def _check_switches(self, given: Mapping[str, Any], config: ServeConfig) -> None:
        """Raise ValueError for what goes to the tokenizer itself, and not to its template as a variable."""
        if config.allow_request_templates or not given:
            return
        own = inspect.signature(self._settings.tokenizer.apply_chat_template).parameters
        switches = [name for name in given if name in own]
        if switches:
            raise ValueError(
                f"chat_template_kwargs: {', '.join(switches)} is not taken from requests; a server begun with "
                "--allow-request-templates takes it"
            )

    def _stripped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**message, "content": _without(message.get("content"), list(special_tokens(self._settings.tokenizer)))}

    def _forced(self, body: Body, source: PromptSource) -> ForcedCall | None:
        choice = body.tool_choice if isinstance(body, ChatBody) else None
        forced = self._format.forced_call(choice, source.tools)
        if forced is not None and body.response_format is not None:
            raise ValueError("give response_format or a forced tool_choice, not both")
        return forced

    def _compiled(self, wanted: object, options: Mapping[str, Any], in_thought: bool) -> SerializedFormat | None:
        """The format, compiled for the tokens that end this request, which are settled as `Request.plan` does."""
        special = special_tokens(self._settings.tokenizer)
        stops = options.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        end_ids = {*options.get("stop_token_ids", ()), *(special[text] for text in stops if text in special)}
        if not options.get("ignore_eos"):
            end_ids |= self._settings.end_ids
        return self._grammars.serialized(wanted, end_ids, in_thought)


def _without(content: Any, tokens: Sequence[str]) -> Any:
    """A message's content without special tokens, also those that come about when others are taken out."""
    if isinstance(content, list):
        return [_without(part, tokens) for part in content]
    if isinstance(content, Mapping):
        return {**content, "text": _without(content["text"], tokens)} if "text" in content else content
    if not isinstance(content, str):
        return content
    while any(token in content for token in tokens):
        for token in tokens:
            content = content.replace(token, "")
    return content
