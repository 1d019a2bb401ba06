"""Forwards requests to the upstream server, and its responses byte by byte."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

import httpx2
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from spec_stack.config import KEEP_RATE_HEADER
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.protocol import BadRequestError

logger = logging.getLogger(__name__)

# The request headers that are the proxy's own.
# Headers of one connection (RFC 9110, section 7.6.1), and those that the client writes itself.
_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
_NOT_FORWARDED = {*_HOP_BY_HOP, b"host", b"content-length", b"expect", KEEP_RATE_HEADER.encode()}
_CONNECT_S = 10.0
# Shorter than servers keep idle connections, so that none is closed while a request is sent.
_IDLE_S = 2.0

Headers = list[tuple[bytes, bytes]]


class Upstream:
    """A client of the upstream server. It knows no other address, and follows no redirects."""

    def __init__(self, config: ProxyConfig) -> None:
        self._base = httpx2.URL(config.base_url)
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(config.timeout_s, connect=min(_CONNECT_S, config.timeout_s), pool=None),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            # Neither proxies nor passwords of the environment.
            trust_env=False,
        )

    async def send(self, request: Request, body: bytes) -> httpx2.Response:
        """Forward a request, and return its response as soon as its headers are there. Raises BadRequestError for a
        path outside the upstream URL, and httpx2.HTTPError without a response."""
        headers = _end_to_end(request.headers.raw, _NOT_FORWARDED)
        # Built by hand: the client would add headers of its own.
        forwarded = httpx2.Request(request.method, self._url(request.scope), headers=headers, content=body)
        return await self._client.send(forwarded, stream=True)

    async def close(self) -> None:
        await self._client.aclose()

    def _url(self, scope: Scope) -> httpx2.URL:
        path: bytes = scope["raw_path"]
        segments = unquote_to_bytes(path).replace(b"\\", b"/").split(b"/")
        if not path.startswith(b"/") or b"." in segments or b".." in segments:
            raise BadRequestError("the path must be absolute, without . and .. in it")
        query: bytes = scope["query_string"]
        whole = self._base.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        try:
            return self._base.copy_with(raw_path=whole)
        except httpx2.InvalidURL as error:
            raise BadRequestError(f"the path cannot be forwarded: {error}") from error


class UpstreamResponse(StreamingResponse):
    """An upstream response with added headers. It is closed when the client disconnects."""

    def __init__(self, upstream: httpx2.Response, added: Mapping[str, str]) -> None:
        super().__init__(upstream.aiter_raw(), upstream.status_code)
        self.raw_headers = _end_to_end(upstream.headers.raw, _HOP_BY_HOP)
        self.headers.update(added)
        self._upstream = upstream

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except httpx2.HTTPError as error:
            # A response without an end makes uvicorn close the connection, so that the client sees the cut.
            logger.warning("upstream ended in the middle of a response: %r", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._upstream.aclose()


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: set[bytes]) -> Headers:
    """Headers that are forwarded: neither dropped nor named by the Connection header."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {each.strip().lower() for name, value in lowered if name == b"connection" for each in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped | named]
