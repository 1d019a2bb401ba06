"""Log lines of both servers, and the id of the request that each is about."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ID_HEADER = "x-request-id"
REASON_HEADER = "x-spec-stack-reason"
PROBES = ("/health", "/ready", "/metrics")
_WELL_FORMED = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_LOGGERS = ("spec_stack", "uvicorn", "py.warnings")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that this task or thread works for; empty outside one."""


def configure_logging(level: str, as_json: bool) -> None:
    """Write lines from this level on to standard error, as text or as a JSON object each."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.captureWarnings(True)
    for name in _LOGGERS:
        known = logging.getLogger(name)
        known.handlers, known.propagate = [handler], False
        known.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """Time, level, message, and the request's id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record) + (f" [{request_id.get()}]" if request_id.get() else "")


class JsonFormatter(logging.Formatter):
    """An object a line, with a request's fields (`extra={"fields": …}`)."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RequestLog:
    """Gives every request an id, the client's own if that is well-formed, echoes it, and logs how the request ended.
    waits: entered while a client waits for an answer, probes left out."""

    def __init__(self, app: ASGIApp, waits: Any = nullcontext) -> None:
        self._app, self._waits = app, waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given, started = Headers(scope=scope).get(ID_HEADER, ""), time.perf_counter()
        request_id.set(given if _WELL_FORMED.fullmatch(given) else secrets.token_hex(8))
        # What a failure outside the application is answered with.
        fields: dict[str, Any] = {"method": scope["method"], "path": _path(scope), "status": 500}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # Upstream's own id stays, by which its operators find the request.
                if headers.setdefault(ID_HEADER, request_id.get()) != request_id.get():
                    fields["upstream_id"] = headers[ID_HEADER]
                fields["status"] = message["status"]
                if REASON_HEADER in headers:
                    fields["reason"] = headers[REASON_HEADER]
            await send(message)

        is_probe = scope["path"] in PROBES
        waiting: AbstractContextManager[None] = nullcontext() if is_probe else self._waits()
        try:
            with waiting:
                await self._app(scope, receive, send_with_id)
        finally:
            fields["seconds"] = round(time.perf_counter() - started, 4)
            line = "%(method)s %(path)s %(status)s in %(seconds)s s" + ("; %(reason)s" if "reason" in fields else "")
            logger.log(logging.DEBUG if is_probe else logging.INFO, line, fields, extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as sent, without the query, which may hold secrets."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw.decode("latin-1"))[1:-1]
