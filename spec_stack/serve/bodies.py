"""Bodies of requests: their fields, and what they mean to the generator."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from spec_stack.config import OLD_SWITCHES
from spec_stack.hf.prompt import PromptSource
from spec_stack.serve.config import ServeConfig

# These are the generator's under the same name; the second row is not OpenAI's: as other servers take them in
# `extra_body`.
_SAME = (
    *("top_p", "seed", "stop", "response_format"),
    *("top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("keep_rate", "sparse_prefill", "policy", "gamma"),
)
MAX_TOP_LOGPROBS = 20
# The one option that is none of the generator's.
MAX_CALLS = "max_calls"


def _one_of(forms: str) -> WrapValidator:
    """Name all the forms of a field where a value has none of them; pydantic names those of the first."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("form", "it must be {forms}", {"forms": forms}) from error

    return WrapValidator(check)


def _unbatched(prompt: Any) -> Any:
    """The one prompt of a batch of one; everything else as it is."""
    is_batch = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)
    return prompt[0] if is_batch else prompt


def _without_null_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as clients send them back, `"tool_calls": null` and the like: templates ask whether a field is there."""
    return [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]


class Body(BaseModel):
    """The options that chats and completions have in common."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Annotated[str | list[str] | None, _one_of("a string or a list of strings")] = None
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
    sparse_prefill: str | None = None
    policy: str | None = None
    gamma: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A field that is null is one that is left out, as OpenAI's clients mean it."""
        for name in OLD_SWITCHES:
            if values.get(name) is not None:
                raise ValueError(f"there is no {name}: it is now sparse_prefill, {OLD_SWITCHES[name]}")
        return {name: value for name, value in values.items() if value is not None}

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

    messages: Annotated[list[dict[str, Any]], AfterValidator(_without_null_fields)]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, _one_of("a string or an object")] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def options(self, config: ServeConfig) -> dict[str, Any]:
        return super().options(config) | ({MAX_CALLS: 1} if self.parallel_tool_calls is False else {})

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

    prompt: Annotated[
        str | list[int],
        _one_of("one text or one list of token ids; send several requests for several"),
        BeforeValidator(_unbatched),
    ]
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
        return PromptSource(input_ids=self.prompt)


BODIES: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
"""By path."""


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise ValueError(f"logit_bias is by token id, got {key!r}") from error
