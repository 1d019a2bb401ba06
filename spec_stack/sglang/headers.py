"""What the headers of the current HTTP request ask for. No SGLang import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from spec_stack.config import header_options


@dataclass(frozen=True)
class RequestHeaders:
    """keep_rate: the text of `x-spec-stack-keep-rate`. route, whole: where the server audits, what the request is
    counted under, and why audits leave its prompt whole."""

    keep_rate: str | None = None
    route: str | None = None
    whole: str | None = None

    def options(self) -> dict[str, Any]:
        """The options that the keep rate stands for. Raises ValueError."""
        return header_options(self.keep_rate)


_NOTHING = RequestHeaders()
_current: ContextVar[RequestHeaders] = ContextVar("request headers", default=_NOTHING)


def current_headers() -> RequestHeaders:
    return _current.get()


@contextmanager
def use_headers(headers: RequestHeaders) -> Iterator[None]:
    """In this block the current request has these headers."""
    token = _current.set(headers)
    try:
        yield
    finally:
        _current.reset(token)
