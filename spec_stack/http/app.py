"""The application that serve and the proxy extend: errors, probes, CORS, metrics, API keys, body limit."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from http import HTTPStatus
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from spec_stack.config import KEEP_RATE_HEADER, header_options
from spec_stack.http.audits import ROUTE_HEADER
from spec_stack.http.config import HttpConfig
from spec_stack.http.errors import CANCELLED, FAILED, MAX_NAME_CHARS, BadRequestError
from spec_stack.http.logs import ID_HEADER, REASON_HEADER, RequestLog, configure_logging, request_id

Result = TypeVar("Result")

# Lists the request fields that the server ignored.
IGNORED_HEADER = "x-spec-stack-ignored"
_COUNTED = [f"x-spec-stack-{part}-tokens" for part in ("prompt", "kept", "recalled")]
_REQUEST_HEADERS = (KEEP_RATE_HEADER, ROUTE_HEADER)
REPORT_HEADERS = (REASON_HEADER, *_COUNTED)
_MAX_HEADER = 300
_MAX_DISCARDED_BYTES = 256 << 20
# zlib's window sizes for the formats of RFC 1952 and 1950.
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class AppMetrics:
    """The metrics that all applications have. outcomes: how a request may end, for the help text. of_app: the arguments
    that every metric takes."""

    def __init__(self, outcomes: str) -> None:
        self.registry = CollectorRegistry()
        self.of_app: dict[str, Any] = {"namespace": "spec_stack", "registry": self.registry}
        how = f"Requests by how they ended ({outcomes})"
        self.requests = Counter("requests", how, ["outcome"], **self.of_app)
        self.wait_s = Histogram("wait_seconds", "From a request to its first work", **self.of_app)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A number that is read on each scrape."""
        Gauge(name, meaning, **self.of_app).set_function(value)


def new_app(
    metrics: AppMetrics,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    obstacle: Callable[[], Awaitable[str]],
    waits: Callable[[], AbstractContextManager[None]],
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """An application with /health, /ready, /metrics, request ids, CORS and OpenAI errors. obstacle: why requests cannot
    be answered now; empty where they can. waits: entered while a client waits."""
    app = FastAPI(title="spec_stack", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, ID_HEADER, *REPORT_HEADERS],
        )
    app.add_middleware(RequestLog, waits=waits)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        why = await obstacle()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StarletteHTTPException)
    async def handle_http_error(request: Request, error: StarletteHTTPException) -> Response:
        what = error.detail
        if what == HTTPStatus.NOT_FOUND.phrase:
            # No route has this path.
            path = request.url.path[:MAX_NAME_CHARS]
            what = f"this server has no {path}; use /v1/chat/completions, or spec-stack proxy before a server that has"
        return error_response(request, BadRequestError(what, status=error.status_code), error.headers)

    @app.exception_handler(BadRequestError)
    async def handle_bad_request(request: Request, error: BadRequestError) -> Response:
        metrics.requests.labels("refused").inc()
        return error_response(request, error, {"Retry-After": "1"} if error.status == 429 else None)

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
        metrics.requests.labels("cancelled").inc()
        return error_response(request, BadRequestError(CANCELLED, status=499))

    @app.exception_handler(Exception)
    async def handle_failure(request: Request, error: Exception) -> Response:
        return error_response(request, BadRequestError(FAILED, status=500), {ID_HEADER: request_id.get()})

    return app


def error_response(request: Request, error: BadRequestError, headers: Mapping[str, str] | None = None) -> Response:
    """An error as an HTTP response, in the format of the API that the request is of."""
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return JSONResponse(error.body(is_anthropic), error.status, headers)


def report_headers(reason: str, counts: Iterable[int] = ()) -> dict[str, str]:
    """The response headers about pruning. counts: tokens of the prompt, and of those the kept and the recalled ones."""
    ascii_reason = reason.encode("ascii", "replace").decode()
    headers = {REASON_HEADER: "".join(filter(str.isprintable, ascii_reason))[:_MAX_HEADER]}
    return headers | dict(zip(_COUNTED, map(str, counts), strict=False))


def client_of(request: Request, api_keys: Sequence[str]) -> str:
    """The client's identity: its API key, or else its address. Raises HTTPException 401 for a wrong key."""
    authorization = request.headers.get("authorization", "")
    scheme, _, key = authorization.partition(" ")
    key = key if scheme.lower() == "bearer" else ""
    if not api_keys:
        # Nothing is checked: any credential that is sent tells clients apart.
        key = key or authorization or request.headers.get("x-api-key") or request.headers.get("api-key", "")
    elif not any(secrets.compare_digest(key.encode(), known.encode()) for known in api_keys):
        raise HTTPException(401, "this server wants an API key: Authorization: Bearer …")
    if key:
        # Hashed, since it is stored as long as the client's sessions.
        return "key " + hashlib.sha256(key.encode()).hexdigest()
    return "address " + (request.client.host if request.client else "")


def options_of_header(request: Request) -> dict[str, Any]:
    """The options that a request's keep-rate header stands for. Raises BadRequestError, also for an unknown header of
    this package."""
    for name in request.headers:
        if name.startswith("x-spec-stack-") and name not in _REQUEST_HEADERS:
            shown = name[:MAX_NAME_CHARS]
            raise BadRequestError(f"{shown} is not known; known are {', '.join(_REQUEST_HEADERS)}", shown)
    try:
        return header_options(request.headers.get(KEEP_RATE_HEADER))
    except ValueError as error:
        raise BadRequestError(str(error), KEEP_RATE_HEADER) from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """A request's body. Raises BadRequestError (413) for a longer one, and ClientDisconnect. The rest of a long body is
    discarded, because many clients read the response only after sending it all."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            parts.append(part)
        if num_bytes > _MAX_DISCARDED_BYTES:
            break
    if num_bytes > max_bytes:
        raise _too_long(max_bytes)
    return b"".join(parts)


def _too_long(max_bytes: int) -> BadRequestError:
    return BadRequestError(f"the body is longer than this server takes, {max_bytes} bytes", status=413)


def decoded(request: Request, body: bytes, max_bytes: int) -> bytes:
    """A request's body without its Content-Encoding. Raises BadRequestError, 413 for over max_bytes."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        if encoding not in _WINDOW_BITS:
            known = ", ".join(_WINDOW_BITS)
            raise BadRequestError(f"the body's Content-Encoding is not read, only {known} are", status=415)
        decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
        try:
            body = decoder.decompress(body, max_bytes + 1)
        except zlib.error:
            raise BadRequestError(f"the body is not {encoding}, as its Content-Encoding says") from None
        if not decoder.eof and len(body) <= max_bytes:
            raise BadRequestError(f"the body ends within its {encoding} stream")
    if len(body) > max_bytes:
        raise _too_long(max_bytes)
    return body


async def unless_disconnected(request: Request, work: asyncio.Future[Result]) -> Result:
    """The result of work, which is cancelled if the client disconnects. The body must have been read. Raises
    ClientDisconnect for cancelled work."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        raise ClientDisconnect from None
    finally:
        watching.cancel()


def begin(config: HttpConfig, port: int) -> None:
    """Log as configured from here on. Raises ValueError for an address that cannot be listened on, before minutes of
    loading."""
    configure_logging(config.log_level, config.log_json)
    host = config.host
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(f"cannot listen: {error.strerror}; name another host or port") from error


def run_app(app: FastAPI, config: HttpConfig, port: int, **settings: Any) -> None:
    """Serve an application until Ctrl-C or SIGTERM; running requests then have `shutdown_s` seconds left."""
    shutdown_s = max(1, round(config.shutdown_s))
    settings |= {"log_config": None, "access_log": False, "timeout_graceful_shutdown": shutdown_s}
    uvicorn.run(app, host=config.host, port=port, **settings)
