"""OpenAI's protocol: request models and conversion to generator options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields
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

from spec_stack.config import WHOLE_PROMPT, DecodeConfig, PrefillConfig
from spec_stack.hf.prompt import PromptSource
from spec_stack.http.errors import MAX_NAME_CHARS, MAX_QUESTION_CHARS, BadRequestError, is_like, unknown_field
from spec_stack.serve.config import ServeConfig
from spec_stack.settings.checks import require

MAX_TOP_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 64, 1000


def _one_of(forms: str) -> WrapValidator:
    """An error with all forms of a field; pydantic reports only the first."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("form", "it must be {forms}", {"forms": forms}) from error

    return WrapValidator(check)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _unbatched(prompt: Any) -> Any:
    """The prompt of a batch of one."""
    is_batch = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)
    return prompt[0] if is_batch else prompt


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message without null fields such as `"tool_calls": null`, because templates test for presence."""
    require(len(str(given.get("role"))) <= MAX_NAME_CHARS, f"the role is over {MAX_NAME_CHARS} characters")
    return {name: value for name, value in given.items() if value is not None or name == "content"}


def _some_or_all(number: int) -> int:
    require(number == -1 or number >= 1, "it must be 1 or more, or -1 for all that the models have positions for")
    return number


MaxTokens = Annotated[int, AfterValidator(_some_or_all)] | None
_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class _Options(BaseModel):
    """The fields that are options of the generator under the same names."""

    top_p: float | None = None
    # -1 is off.
    seed: int | None = Field(None, ge=-1, lt=1 << 63)
    # Few and short ones: each is searched for at every step.
    stop: Annotated[
        Annotated[list[_StopString], Field(max_length=MAX_STOPS)] | None,
        _one_of(f"a string or a list of strings; at most {MAX_STOPS}, each of at most {MAX_STOP_CHARS} characters"),
        BeforeValidator(_listed),
    ] = None
    # By token id, which JSON has as strings.
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None
    response_format: dict[str, Any] | None = None
    # Extensions to OpenAI's API.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    max_time: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    keep_rate: float | None = None
    sparse_prefill: str | None = None
    max_dropped_attention: float | None = None
    question: str | None = Field(None, max_length=MAX_QUESTION_CHARS)
    policy: str | None = None
    gamma: int | None = None


class GenerationRequest(_Options, ABC):
    """The fields that chat completions and completions share."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    max_tokens: MaxTokens = None
    temperature: float | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # Accepted without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Treat null fields as absent, as OpenAI's clients do."""
        return {name: value for name, value in values.items() if value is not None}

    @abstractmethod
    def source(self) -> PromptSource:
        """The prompt. Raises ValueError for fields that would change it and are not supported."""

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """The number of top tokens per position; None without log-probabilities."""

    @property
    def max_calls(self) -> int | None:
        """The maximum number of tool calls in an answer, if limited."""
        return None

    def options(self, config: ServeConfig) -> dict[str, Any]:
        """Options of `stream`. Raises ValueError for an unsupported one."""
        if self.n > config.max_choices:
            raise ValueError(f"n must be {config.max_choices} or less")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported; see repetition_penalty")
        options = self.model_dump(include=set(_Options.model_fields), exclude_none=True)
        if options.get("keep_rate") == 1 and options.get("sparse_prefill") in (None, "auto", "on"):
            options |= WHOLE_PROMPT
        temperature = config.temperature if self.temperature is None else self.temperature
        if config.max_time is not None:
            options["max_time"] = min(config.max_time, options.get("max_time", config.max_time))
        return options | {
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "logprobs": self.num_logprobs(),
        }


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_message)]]
    max_completion_tokens: MaxTokens = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, _one_of("a string or an object")] = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel_tool_calls else 1

    def source(self) -> PromptSource:
        return PromptSource(
            messages=self.messages,
            tools=None if self.tool_choice == "none" else self.tools,
            documents=self.documents,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
        )

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self.top_logprobs if self.logprobs else None

    def options(self, config: ServeConfig) -> dict[str, Any]:
        return super().options(config) | {"max_tokens": self.max_completion_tokens or self.max_tokens}


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | list[int],
        _one_of("one text or one list of token ids; send several requests for several"),
        BeforeValidator(_unbatched),
    ]
    echo: bool = False
    suffix: str = ""
    best_of: int = 1
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def source(self) -> PromptSource:
        if self.echo or self.suffix or self.best_of != 1:
            raise ValueError("echo, suffix and best_of are not supported")
        if isinstance(self.prompt, str):
            return PromptSource(prompt=self.prompt)
        return PromptSource(input_ids=self.prompt)

    def num_logprobs(self) -> int | None:
        return self.logprobs


_OWN = ("keep_rate", "sparse_prefill", "max_dropped_attention", "max_time", "question", "policy", "gamma")
_FIELDS = f"here {', '.join(_OWN)} are fields themselves"
# Names by which other entry points take such options, and what does the same here.
_ELSEWHERE = {
    "spec_stack": f"spec_stack is the proxy's field; {_FIELDS}",
    "custom_params": f"custom_params are SGLang's; {_FIELDS}",
    "max_divergence": "max_divergence is max_dropped_attention now, a share of the draft's attention",
    "extra_body": f"extra_body is an argument of OpenAI's client, which makes fields of its entries; {_FIELDS}",
    **{
        name: f"{name} is not taken here; text in a system message is never pruned" for name in ("protect", "protected")
    },
    **{
        entry.name: f"{entry.name} is set where the server is started; {_FIELDS}"
        for config in (PrefillConfig, DecodeConfig)
        for entry in fields(config)
        # What is no option has no metadata.
        if entry.metadata and entry.name not in _OWN
    },
}


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raise BadRequestError for unknown names that are like options of this package, which OpenAI's API does not have;
    other unknown fields are ignored, as OpenAI's servers do."""
    for name in names:
        if name in _ELSEWHERE:
            raise BadRequestError(_ELSEWHERE[name], name)
        if is_like(name, (*_OWN, "spec_stack")):
            raise unknown_field(name, _OWN)


REQUESTS: dict[str, type[GenerationRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
"""By path."""
