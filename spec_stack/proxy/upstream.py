"""Forwards requests to the upstream server, and its responses byte by byte."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes
from urllib.request import getproxies, proxy_bypass

import httpcore2
import httpx2
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from spec_stack.config import KEEP_RATE_HEADER
from spec_stack.http.app import REPORT_HEADERS
from spec_stack.http.config import LOOPBACK
from spec_stack.http.errors import BadRequestError
from spec_stack.http.logs import ID_HEADER, request_id
from spec_stack.proxy.config import ProxyConfig

logger = logging.getLogger(__name__)

# Headers of one connection (RFC 9110, section 7.6.1), and those that the client writes itself.
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
_NOT_FORWARDED = {
    *(*_HOP_BY_HOP, b"host", b"content-length", b"expect"),
    *(KEEP_RATE_HEADER.encode(), b"x-spec-stack-route", ID_HEADER.encode()),
}
# An upstream that prunes as well, such as `spec-stack serve`, reports about another prompt.
_NOT_PASSED_ON = {*_HOP_BY_HOP, *(name.encode() for name in REPORT_HEADERS)}
_CONNECT_S = 10.0
# Shorter than servers keep idle connections, so that none is closed while a request is sent.
_IDLE_S = 2.0
# Bytes that are sent between two looks at whether the server has answered already.
_PIECE = 1 << 16
_REFUSAL = re.compile(rb"HTTP/1\.[01] [345]")

Headers = list[tuple[bytes, bytes]]
UpstreamError = (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError)
"""Errors of a request without a response."""


class Upstream:
    """A client of the upstream server. It knows no other address, and follows no redirects. Raises ValueError for
    certificates that cannot be read."""

    def __init__(self, config: ProxyConfig) -> None:
        self._base, self._strips_v1 = httpx2.URL(config.base_url), config.names_version
        self._timeout_s = config.timeout_s
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_ssl_context(config.ca_file),
            proxy=_outgoing_proxy(config.outgoing_proxy, self._base),
            max_connections=None,
            keepalive_expiry=_IDLE_S,
            network_backend=_Backend(),
        )

    async def send(
        self, request: Request, body: bytes, is_changed: bool, but: Collection[bytes] = ()
    ) -> httpcore2.Response:
        """Forward a request, and return its response as soon as its headers are there. is_changed: the body is not the
        client's. but: headers that are left out. Raises BadRequestError for a path outside the upstream URL, and
        `UpstreamError`."""
        dropped = {*_NOT_FORWARDED, *but, *([b"content-encoding"] if is_changed else [])}
        headers = _end_to_end(request.headers.raw, dropped)
        if body or "content-length" in request.headers or "transfer-encoding" in request.headers:
            headers.append((b"content-length", str(len(body)).encode()))
        if request_id.get():
            headers.append((ID_HEADER.encode(), request_id.get().encode()))
        return await self._send(request.method, self._target(request.scope), headers, body, self._timeout_s)

    async def obstacle(self, timeout_s: float) -> str:
        """Why the server cannot be asked now; empty where it answers, even with 401 or 404."""
        try:
            response = await self._send("GET", self._base.raw_path.rstrip(b"/") + b"/v1/models", [], b"", timeout_s)
        except UpstreamError as error:
            return f"upstream does not answer: {type(error).__name__} {error}".rstrip()
        await response.aclose()
        return f"upstream answers {response.status}" if response.status >= 500 else ""

    async def close(self) -> None:
        await self._pool.aclose()

    async def _send(
        self, method: str, target: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> httpcore2.Response:
        base = self._base
        url = httpcore2.URL(scheme=base.raw_scheme, host=base.raw_host, port=base.port, target=target)
        timeout = {"connect": min(_CONNECT_S, timeout_s), "read": timeout_s, "write": timeout_s}
        request = httpcore2.Request(
            method, url, headers=[(b"host", base.netloc), *headers], content=body, extensions={"timeout": timeout}
        )
        return await self._pool.handle_async_request(request)

    def _target(self, scope: Scope) -> bytes:
        path: bytes = scope["raw_path"]
        segments = unquote_to_bytes(path).replace(b"\\", b"/").split(b"/")
        if not path.startswith(b"/") or b"." in segments or b".." in segments:
            raise BadRequestError("the path must be absolute, without . and .. in it")
        query: bytes = scope["query_string"]
        if self._strips_v1:
            path = path.removeprefix(b"/v1")
        return self._base.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")


class UpstreamResponse(StreamingResponse):
    """An upstream response with added headers. It is closed when the client disconnects. on_end: called when all of it
    was passed on."""

    def __init__(
        self, upstream: httpcore2.Response, added: Mapping[str, str], on_end: Callable[[], None] | None = None
    ) -> None:
        super().__init__(upstream.aiter_stream(), upstream.status)
        self.raw_headers = _end_to_end(upstream.headers, _NOT_PASSED_ON)
        self.headers.update(added)
        self._upstream, self._on_end = upstream, on_end

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except UpstreamError as error:
            # A response without an end makes uvicorn close the connection, so that the client sees the cut.
            logger.warning("upstream ended in the middle of a response: %r", error)
            return
        if self._on_end is not None:
            self._on_end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._upstream.aclose()


class _Backend(httpcore2.AnyIOBackend):
    """Connections that notice a refusal while they send."""

    async def connect_tcp(self, *args: Any, **settings: Any) -> httpcore2.AsyncNetworkStream:
        return _Connection(await super().connect_tcp(*args, **settings))


class _Connection(httpcore2.AsyncNetworkStream):
    """A connection that ends a long write when the server refuses the request (401, 413) before it has read it all, as
    Go's servers do: what is sent afterwards resets the connection, and the response is lost with it."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream, self._early = stream, b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not self._early:
            return await self._stream.read(max_bytes, timeout)
        read, self._early = self._early[:max_bytes], self._early[max_bytes:]
        return read

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if len(buffer) <= _PIECE:
            return await self._stream.write(buffer, timeout)
        answer = asyncio.create_task(self._stream.read(_PIECE))
        try:
            for start in range(0, len(buffer), _PIECE):
                piece = asyncio.create_task(self._stream.write(buffer[start : start + _PIECE], timeout))
                await asyncio.wait([answer, piece], return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and answer.exception() is None and _REFUSAL.match(answer.result()):
                    piece.cancel()
                    # The pool then reads the response.
                    raise httpcore2.WriteError("the server has answered already")
                await piece
        finally:
            answer.cancel()
            await asyncio.wait([answer])
            if not answer.cancelled() and answer.exception() is None:
                self._early += answer.result()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(self, *args: Any, **settings: Any) -> httpcore2.AsyncNetworkStream:
        return _Connection(await self._stream.start_tls(*args, **settings))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _ssl_context(ca_file: str) -> ssl.SSLContext:
    """The system's authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR, and further ones."""
    context = httpcore2.default_ssl_context()
    if folder := os.environ.get("SSL_CERT_DIR"):
        # Also where SSL_CERT_FILE is set, as OpenSSL reads them.
        context.load_verify_locations(capath=folder)
    if ca_file:
        try:
            context.load_verify_locations(**{"capath" if os.path.isdir(ca_file) else "cafile": ca_file})
        except OSError as error:
            raise ValueError(f"ca_file {ca_file} holds no certificate authorities: {error.strerror}") from error
    return context


def _outgoing_proxy(given: str, upstream: httpx2.URL) -> httpcore2.Proxy | None:
    """The HTTP proxy on the way to a server, by default that of the environment, as other clients find it."""
    if given == "none" or (given == "env" and (upstream.host in LOOPBACK or proxy_bypass(upstream.netloc.decode()))):
        return None
    proxies = getproxies() if given == "env" else {"all": given}
    found = proxies.get(upstream.scheme) or proxies.get("all")
    if not found:
        return None
    url = httpx2.URL(found if "://" in found else f"http://{found}")
    if url.scheme not in ("http", "https"):
        raise ValueError(f"the outgoing proxy must be an HTTP proxy, got a URL of {url.scheme}; see outgoing_proxy")
    auth = (url.username, url.password) if url.username else None
    return httpcore2.Proxy(httpcore2.URL(str(url.copy_with(username=None, password=None))), auth=auth)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: set[bytes]) -> Headers:
    """Headers that are forwarded: neither dropped nor named by the Connection header."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {each.strip().lower() for name, value in lowered if name == b"connection" for each in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped | named]
