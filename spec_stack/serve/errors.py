"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return what an error says."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": _sendable(message), "type": kind, "param": param and _sendable(param), "code": status}


def _sendable(text: str) -> str:
    """A text that may quote a request, with the halves of characters in it escaped, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a response that says it."""
    return JSONResponse({"error": error_body(status, message, param)}, status_code=status, headers=headers)
