"""Refuses bodies that are too long, so that the client can read why."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_stack.serve.errors import error_response

# A client reads the answer when it has sent its body. So much of one that is refused is taken, and thrown away.
_MAX_DRAINED_BYTES, _MAX_DRAIN_S = 256 << 20, 5.0


class RefuseLongBodies:
    """Refuses requests by the length that they declare, or once they have grown too long.

    Parameters
    ----------
    app : ASGIApp
        Answers the others.
    max_bytes : int
        Longest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        length = headers.get("content-length", "")
        refusal = error_response(413, f"the body is longer than this server takes, {self._max_bytes} bytes")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            # A client that asked beforehand has sent nothing yet.
            if headers.get("expect", "").lower() != "100-continue":
                await _drain(receive)
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise _TooLong
            return message

        try:
            await self._app(scope, count, send)
        except _TooLong:
            await _drain(receive)
            await refusal(scope, receive, send)


class _TooLong(BaseException):
    """A body of no declared length has grown too long. No Exception, so that nobody answers it as a failure."""


async def _drain(receive: Receive) -> None:
    """Take the rest of a body, and throw it away."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_MAX_DRAIN_S):
            while num_bytes < _MAX_DRAINED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
