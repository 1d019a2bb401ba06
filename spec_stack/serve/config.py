"""The server's configuration, with every default and meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from spec_stack.settings.checks import check_fields, require
from spec_stack.settings.options import documented, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535
# Text has about 4 bytes per token, whitespace and code more.
_BYTES_PER_POSITION, _LEAST_BYTES = 32, 1 << 16


def _is_origin(text: object) -> bool:
    return isinstance(text, str) and (text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text) is not None)


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """What serve and the proxy share: address, queue, log lines, and audits of pruned requests."""

    host: str = option("127.0.0.1", "address to listen on; the default accepts connections from the same machine only")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least level of the lines on standard error; a request is a line of info"
    )
    log_json: bool = option(False, "log a JSON object a line, with the request's id")
    max_queued: int = option(
        64, "most waiting requests; serve rejects more (429), the proxy forwards them whole", least=1
    )
    max_queued_per_client: int = option(16, "of those, how many of one client", least=1)
    shutdown_s: float = option(10.0, "seconds that running requests have after SIGTERM")
    audit_rate: float = option(
        0.0,
        "share of pruned requests that are answered again from the whole and from the pruned prompt, while no client "
        "waits; a proxy uses the client's credentials. 0 audits nothing",
    )
    audit_max_loss: float | None = option(
        None,
        "share of lost answers of a route over which its prompts are forwarded whole, by the lower 95 % bound of its "
        "latest 20 audits, until they find less; a request's own keep rate holds. None reports alone",
    )
    audit_idle_s: float = option(0.5, "seconds without a request before an audit begins")
    max_audits: int = option(16, "most requests that wait for an audit; the oldest gives way", least=1)

    def check_server(self) -> None:
        """Raise ValueError for bad values."""
        check_fields(self)
        require(0 <= self.shutdown_s < math.inf, f"shutdown_s must be 0 or more, got {self.shutdown_s!r}")
        for name in ("audit_rate", "audit_max_loss"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"{name} must be a share, 0 to 1, got {value!r}")
        require(0 < self.audit_idle_s < math.inf, f"audit_idle_s must be over 0, got {self.audit_idle_s!r}")
        has_audits = self.audit_max_loss is None or self.audit_rate > 0
        require(has_audits, "audit_max_loss needs audits; give an audit_rate over 0")


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
        for name in ("prepare_s", "max_time"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"{name} must be over 0, got {value!r}")

    def body_limit(self, num_positions: int) -> int:
        """max_body_bytes, by default derived from the models' number of positions."""
        return self.max_body_bytes or max(_LEAST_BYTES, _BYTES_PER_POSITION * num_positions)
