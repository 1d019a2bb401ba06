"""Errors in the formats of OpenAI's and Anthropic's APIs, and misspelt names of fields."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

# Longest role of a message, and longest name of an unknown field.
MAX_NAME_CHARS = 64
# Least likeness of a name to the option that it is a misspelling of.
_LIKENESS = 0.8
MAX_QUESTION_CHARS = 4000
CANCELLED = "the request was cancelled"
FAILED = "the server could not answer this request; its log says why"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}
_ANTHROPIC_TYPES = _ERROR_TYPES | {413: "request_too_large", 499: "invalid_request_error", 504: "timeout_error"}


class BadRequestError(Exception):
    """An error for the client: message, field and HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, param, status)
        self.message, self.param, self.status = message, param, status

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """The error in OpenAI's format, or in Anthropic's."""
        kind = (_ANTHROPIC_TYPES if anthropic else _ERROR_TYPES).get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "api_error" if anthropic else "server_error"
        if anthropic:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def first_problem(error: ValidationError, prefix: str = "") -> BadRequestError:
    """The first error of a validation."""
    first = error.errors()[0]
    where = ".".join(map(str, [*filter(None, [prefix]), *first["loc"]]))
    message = first["msg"].removeprefix("Value error, ")
    return BadRequestError(f"{where}: {message}" if where else message, where or None)


def is_like(name: str, known: Sequence[str]) -> bool:
    """Whether a name of a field is a misspelling of one of the known ones; foreign fields pass."""
    return bool(get_close_matches(name[:MAX_NAME_CHARS].lower(), known, 1, _LIKENESS))


def unknown_field(name: str, known: Sequence[str]) -> BadRequestError:
    """The error for a field that should be one of the known ones."""
    shown, near = name[:MAX_NAME_CHARS], get_close_matches(name[:MAX_NAME_CHARS].lower(), known, 1)
    meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return BadRequestError(f"{shown} is not known; {meant}", shown)
