"""How the endpoint is served. Every default and its meaning live here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_stack.settings.options import documented, option


@documented
@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible endpoint over one generator, which answers one request at a time."""

    host: str = option("127.0.0.1", "address to listen on; this one is for programs on the same machine only")
    port: int = option(8000, "port to listen on")
    model_name: str = option("spec-stack", "what clients call the model")
    api_keys: Sequence[str] = field(
        default=(), repr=False, metadata={"help": "keys of which a request must bring one; none lets everybody in"}
    )
    temperature: float = option(1.0, "of requests that name none, as OpenAI's own; 0 is greedy")
    default_max_tokens: int = option(512, "most tokens for requests that say none, as far as the models have positions")
    max_body_bytes: int = option(8 << 20, "longest body of a request; longer ones are refused (413)")
    max_prompt_tokens: int | None = option(None, "longest prompt (400); None is what the models have positions for")
    max_queued: int = option(64, "requests that may wait; more are refused (429)")
    max_queued_per_client: int = option(16, "of those, how many of one client")
    max_choices: int = option(8, "largest n of a request")
    max_sessions: int = option(
        8, "conversations whose caches are kept, the least recently used goes first; 0 keeps none"
    )
    shutdown_s: float = option(10.0, "seconds that running requests have left when the server is told to end")

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_queued", "max_queued_per_client", "max_choices", "default_max_tokens"):
            _require_int(name, getattr(self, name), 1)
        _require_int("port", self.port, 0)
        _require_int("max_sessions", self.max_sessions, 0)
        if self.max_prompt_tokens is not None:
            _require_int("max_prompt_tokens", self.max_prompt_tokens, 1)
        if isinstance(self.api_keys, str) or not all(isinstance(key, str) and key for key in self.api_keys):
            raise ValueError("api_keys must be a list of non-empty strings")
        if not (self.temperature >= 0 and self.shutdown_s >= 0):
            raise ValueError("temperature and shutdown_s must be 0 or more")


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")
