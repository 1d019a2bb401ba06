"""The header `x-spec-stack-keep-rate` of the current request. No SGLang import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from spec_stack.config import header_options

_asked: ContextVar[str | None] = ContextVar("keep rate", default=None)


def asked_keep_rate() -> str | None:
    """The current request's header."""
    return _asked.get()


@contextmanager
def asking(keep_rate: str | None) -> Iterator[None]:
    """In this block the current request has this header."""
    token = _asked.set(keep_rate)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_options() -> dict[str, Any]:
    """The options that the current request's header stands for. Raises ValueError."""
    return header_options(_asked.get())
