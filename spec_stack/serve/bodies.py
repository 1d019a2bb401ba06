"""Bodies of requests, checked, and what they mean to the generator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spec_stack.api.answering import Answering
from spec_stack.serve.config import ServeConfig

# Of OpenAI's options these are the generator's under the same name; those it does not have are refused where they are
# given, for a request that is answered without them is answered wrongly.
_SAME = (
    "top_p",
    "seed",
    "stop",
    "logit_bias",
    "response_format",
    # Not OpenAI's, as other servers take them in `extra_body`.
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "keep_rate",
    "specprefill",
    "policy",
    "gamma",
)


class Body(BaseModel):
    """What chats and completions have in common. Unknown options are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    # Taken and of no effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    keep_rate: float | None = None
    specprefill: bool | None = None
    policy: str | None = None
    gamma: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with what it cost."""
        return bool((self.stream_options or {}).get("include_usage"))

    def prompt_options(self) -> dict[str, Any]:
        """The prompt as `generate` takes it."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """Most tokens asked for, if the request says."""
        return self.max_tokens

    def options(self, config: ServeConfig) -> dict[str, Any]:
        """Options of `stream` beside the prompt and the number of tokens.

        Raises
        ------
        ValueError
            For one that this server cannot heed.
        """
        if self.n > config.max_choices:
            raise ValueError(f"n must be {config.max_choices} or less")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported; see repetition_penalty")
        given = {name: getattr(self, name) for name in _SAME if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        check_known(given)
        return {"temperature": config.temperature if self.temperature is None else self.temperature} | given


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompt_options(self) -> dict[str, Any]:
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice must be 'auto' or 'none'; the model decides, it cannot be forced")
        if self.logprobs:
            raise ValueError("logprobs are not served; SpecStackGenerator.generate gives them")
        named = {
            "tools": None if self.tool_choice == "none" else self.tools,
            "documents": self.documents,
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": self.continue_final_message,
        }
        return {"messages": self.messages} | {name: value for name, value in named.items() if value is not None}


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[int] | list[str]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def prompt_options(self) -> dict[str, Any]:
        if self.echo or self.suffix or self.best_of not in (None, 1) or self.logprobs is not None:
            raise ValueError("echo, suffix, best_of and logprobs are not supported")
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        if len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return {"prompt": self.prompt[0]}
        if any(isinstance(part, str) for part in self.prompt):
            raise ValueError("prompt must be one text or one list of token ids; send several requests for several")
        return {"input_ids": self.prompt}


def check_known(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that the generator does not have."""
    known: Sequence[str] = list(inspect.signature(Answering.stream).parameters)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not supported")


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise ValueError(f"logit_bias is by token id, got {key!r}") from error
