"""The server's configuration, with every default and meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_stack.http.config import MAX_PORT, HttpConfig
from spec_stack.settings.checks import require
from spec_stack.settings.options import documented, option

# Text has about 4 bytes per token, whitespace and code more.
_BYTES_PER_POSITION, _LEAST_BYTES = 32, 1 << 16


def _is_origin(text: object) -> bool:
    return isinstance(text, str) and (text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text) is not None)


@documented
@dataclass(frozen=True)
class ServeConfig(HttpConfig):
    """An OpenAI-compatible endpoint over one generator, which answers one request at a time."""

    port: int = option(8000, "port to listen on, 0 to 65535; 0 takes a free one", least=0, most=MAX_PORT)
    model_name: str = option("spec-stack", "what clients call the model")
    api_keys: Sequence[str] = field(
        default=(), repr=False, metadata={"help": "API keys, one of which a request must have; none disables the check"}
    )
    cors_origins: Sequence[str] = option(
        (), "browser origins that are allowed (CORS), such as https://chat.example.org, or * for all; none by default"
    )
    temperature: float = option(1.0, "temperature of requests that set none, as OpenAI's own; 0 is greedy")
    default_max_tokens: int = option(
        512, "max_tokens of requests that set none, as far as the models have positions", least=1
    )
    max_time: float | None = option(
        None, "most seconds of work on an answer, which then ends with finish_reason length; a request may set fewer"
    )
    max_body_bytes: int | None = option(
        None, "longest body of a request (413); None is 32 for each position that the models have", least=1
    )
    max_prompt_tokens: int | None = option(
        None, "longest prompt, in tokens (400); None is the models' number of positions", least=1
    )
    prepare_s: float = option(
        0.8, "CPU seconds for rendering, tokenizing and compiling a request (400), and 5 more for each MB of it"
    )
    max_prepare_bytes: int = option(256 << 20, "bytes of memory for the same work (400)", least=1)
    strip_special_tokens: bool = option(
        False, "remove special tokens from chat messages, so that no message can imitate another"
    )
    max_choices: int = option(8, "largest n of a request", least=1)
    max_sessions: int = option(
        8, "conversations whose caches are kept, least recently used evicted first; 0 keeps none", least=0
    )

    def __post_init__(self) -> None:
        self.check_server()
        is_name = isinstance(self.model_name, str) and bool(self.model_name.strip())
        require(is_name, f"model_name must be a non-empty string, got {self.model_name!r}")
        if isinstance(self.api_keys, str) or not all(isinstance(key, str) and key for key in self.api_keys):
            raise ValueError("api_keys must be a list of non-empty strings")
        if isinstance(self.cors_origins, str) or not all(map(_is_origin, self.cors_origins)):
            raise ValueError(
                "cors_origins must be a list of * or of origins without a path, such as https://chat.example.org, "
                f"got {self.cors_origins!r}"
            )
        require(0 <= self.temperature < math.inf, f"temperature must be 0 or more, got {self.temperature!r}")
        self.require_positive("prepare_s", "max_time")

    def body_limit(self, num_positions: int) -> int:
        """max_body_bytes, by default derived from the models' number of positions."""
        return self.max_body_bytes or max(_LEAST_BYTES, _BYTES_PER_POSITION * num_positions)
