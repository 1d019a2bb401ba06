"""What requests and replies over HTTP carry next to their bodies. No SGLang import.

Header `x-spec-stack-keep-rate`, as the proxy's, for every endpoint: a keep rate, which prunes at any length; 1 prefills
the whole prompt. Options in a body hold against it. `x-spec-stack-route`, as the proxy's, names the route that audits
count a request under. An OpenAI stream takes its report into the usage chunk.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

from spec_stack.config import KEEP_RATE_HEADER
from spec_stack.sglang.errors import log_and_continue
from spec_stack.sglang.headers import RequestHeaders, use_headers
from spec_stack.sglang.metrics import ReportStore
from spec_stack.sglang.request import KEY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class SpecStackMiddleware:
    """ASGI middleware of SGLang's application."""

    def __init__(self, app: Any, books: ReportStore) -> None:
        self._app, self._books = app, books

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(KEEP_RATE_HEADER.encode())
        audits = self._books.audits if scope.get("method") == "POST" else None
        route, whole = (None, None) if audits is None else audits.route_of(scope)
        headers = RequestHeaders(None if given is None else given.decode("latin-1"), route, whole or None)

        async def send_with_report(message: Message) -> None:
            body = message.get("body", b"")
            # Every other chunk has a choice in it, and most of a stream's cost is in its chunks.
            if b'"choices":[]' in body and b'"usage":{' in body and message.get("more_body"):
                message["body"] = with_report(body, self._books)
            await send(message)

        with use_headers(headers), nullcontext() if audits is None else audits.client_waits():
            await self._app(scope, receive, send_with_report)


def with_report(event: bytes, books: ReportStore) -> bytes:
    """The usage chunk of an OpenAI stream with the report (stream_options.include_usage), else the event itself.

    Of several replies in one stream that chunk has the id of one.
    """
    with log_and_continue("writing a report", "the reply has none"):
        name, _, data = event.decode().strip().partition(" ")
        chunk = json.loads(data) if name == "data:" else {}
        report = books.report_of(chunk.get("id"))
        if report is not None:
            return f"data: {json.dumps(chunk | {KEY: dict(report)})}\n\n".encode()
    return event
