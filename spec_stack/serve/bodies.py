"""Bodies of requests: their fields, and what they mean to the generator."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spec_stack.hf.prompt import PromptSource
from spec_stack.serve.config import ServeConfig

# These are the generator's under the same name; the second row is not OpenAI's: as other servers take them in
# `extra_body`.
_SAME = (
    *("top_p", "seed", "stop", "response_format"),
    *("top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("keep_rate", "specprefill", "prune", "policy", "gamma"),
)
MAX_TOP_LOGPROBS = 20


class Body(BaseModel):
    """The options that chats and completions have in common."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
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
    prune: str | None = None
    policy: str | None = None
    gamma: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream is to end with what it cost."""
        return bool((self.stream_options or {}).get("include_usage"))

    def source(self) -> PromptSource:
        """Return the prompt."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """Most tokens asked for, if the request says."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many likely tokens are wanted beside each; None where no log-probability is."""
        raise NotImplementedError

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
                # A request that is answered without them is answered wrongly.
                raise ValueError(f"{name} is not supported; see repetition_penalty")
        given = {name: getattr(self, name) for name in _SAME if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        given["logprobs"] = self.num_logprobs()
        return {"temperature": config.temperature if self.temperature is None else self.temperature} | given


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def source(self) -> PromptSource:
        return PromptSource(
            messages=self.messages,
            tools=None if self.tool_choice == "none" else self.tools,
            documents=self.documents,
            chat_template_kwargs=self.chat_template_kwargs or {},
            continue_final_message=bool(self.continue_final_message),
        )


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def source(self) -> PromptSource:
        if self.echo or self.suffix or self.best_of not in (None, 1):
            raise ValueError("echo, suffix and best_of are not supported")
        if isinstance(self.prompt, str):
            return PromptSource(prompt=self.prompt)
        if len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return PromptSource(prompt=self.prompt[0])
        if any(isinstance(part, str) for part in self.prompt):
            raise ValueError("prompt must be one text or one list of token ids; send several requests for several")
        return PromptSource(input_ids=[part for part in self.prompt if isinstance(part, int)])


BODIES: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
"""By path."""


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise ValueError(f"logit_bias is by token id, got {key!r}") from error
