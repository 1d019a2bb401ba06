"""The application: an upstream server's API, with prompts pruned on the way (extra `serve`)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import Response

from spec_stack.api.pruner import Pruner
from spec_stack.config import KEEP_RATE_HEADER
from spec_stack.proxy.config import LOOPBACK, ProxyConfig
from spec_stack.proxy.pruning import PromptPruner, Pruning
from spec_stack.proxy.upstream import Upstream, UpstreamResponse
from spec_stack.serve.http import client_of, new_app, read_body, run_app, unless_disconnected
from spec_stack.serve.protocol import BadRequestError

logger = logging.getLogger(__name__)

# The field that holds the prompt, by path.
PRUNED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/messages": "messages"}
# Fields under which the answer holds the prompt, or goes on inside it.
_WHOLE_FIELDS = ("echo", "suffix", "prompt_logprobs")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_CHECK_S = 2.0
_MAX_HEADER = 300


def build_app(pruner: Pruner, config: ProxyConfig) -> FastAPI:
    """Build the proxy, whose scoring thread runs from its startup to its shutdown."""
    prompts, upstream = PromptPruner(pruner, config), Upstream(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await prompts.stop()
        await upstream.close()

    app = new_app(prompts.metrics, lifespan)
    app.add_route("/{path:path}", Endpoint(prompts, upstream, config).answer, methods=_METHODS)
    return app


def serve_proxy(pruner: Pruner, config: ProxyConfig) -> None:
    """Run the proxy until Ctrl-C or SIGTERM. Running requests then have `shutdown_s` seconds left."""
    if config.host not in LOOPBACK:
        logger.warning("listening on %s: whoever reaches this machine reaches %s", config.host, config.upstream)
    try:
        httpx2.get(f"{config.base_url}/v1/models", timeout=_CHECK_S, trust_env=False)
    except httpx2.HTTPError as error:
        logger.warning("%s does not answer yet: %s", config.upstream, error)
    # Upstream's own Server and Date headers are passed on.
    settings = {"limit_concurrency": config.max_connections, "server_header": False, "date_header": False}
    run_app(build_app(pruner, config), config.host, config.port, config.shutdown_s, **settings)


class Endpoint:
    """Handles an HTTP request: prune its prompt, forward it, pass the response on."""

    def __init__(self, prompts: PromptPruner, upstream: Upstream, config: ProxyConfig) -> None:
        self._prompts, self._upstream, self._config = prompts, upstream, config
        self._outcomes = prompts.metrics.requests

    async def answer(self, request: Request) -> Response:
        """Any request. It is cancelled when its client disconnects."""
        body = await read_body(request, self._config.max_body_bytes)
        return await unless_disconnected(request, asyncio.create_task(self._forward(request, body)))

    async def _forward(self, request: Request, body: bytes) -> Response:
        body, headers = await self._pruned(request, body)
        try:
            response = await self._upstream.send(request, body)
        except httpx2.TimeoutException:
            self._outcomes.labels("failed").inc()
            return BadRequestError("the upstream server did not answer in time", status=504).response(headers)
        except httpx2.HTTPError as error:
            logger.warning("upstream did not answer: %r", error)
            self._outcomes.labels("failed").inc()
            message = "the upstream server did not answer; the proxy's log says why"
            return BadRequestError(message, status=502).response(headers)
        self._outcomes.labels("ok").inc()
        return UpstreamResponse(response, headers)

    async def _pruned(self, request: Request, body: bytes) -> tuple[bytes, dict[str, str]]:
        """The body to forward, and headers that say what was done."""
        field = PRUNED.get(request.url.path)
        if field is None or request.method != "POST":
            return body, {}
        keep_rate = _keep_rate(request)
        parsed = _parsed(body, field) if len(body) <= self._config.max_parsed_bytes else "the body is too long to parse"
        if keep_rate == 1:
            pruning = Pruning("dense", f"off: {KEEP_RATE_HEADER} is 1")
        elif isinstance(parsed, str):
            pruning = Pruning("unread", f"off: {parsed}")
        else:
            pruning = await self._prompts.prune(client_of(request, ()), _prompt(parsed, field), keep_rate)
            if pruning.prompt is not None:
                body = _with_prompt(parsed, field, pruning.prompt)
        self._prompts.metrics.add(pruning)
        return body, _headers(pruning)


def _keep_rate(request: Request) -> float | None:
    """The keep rate that a request asks for. Raises BadRequestError."""
    given = request.headers.get(KEEP_RATE_HEADER)
    if given is None:
        return None
    try:
        keep_rate = float(given)
    except ValueError:
        keep_rate = math.nan
    if not 0 < keep_rate <= 1:
        raise BadRequestError(f"{KEEP_RATE_HEADER} must be over 0 and at most 1; 1 forwards the whole prompt")
    return keep_rate


def _parsed(body: bytes, field: str) -> dict[str, Any] | str:
    """The body, or the reason why its prompt is forwarded as it is."""
    try:
        parsed = json.loads(body)
        # NaN and 1e999 cannot be written again.
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        return "the body is not JSON"
    if not isinstance(parsed, dict):
        return "the body is not a JSON object"
    for name in _WHOLE_FIELDS:
        if parsed.get(name) is not None and parsed[name] is not False:
            return f"{name} is about the whole prompt"
    prompt = _prompt(parsed, field)
    is_chat = isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))
    return parsed if is_chat or (field == "prompt" and isinstance(prompt, str)) else f"{field} holds no text to prune"


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _prompt(body: Mapping[str, Any], field: str) -> Any:
    """The messages or the text; a batch of one text is that text."""
    prompt = body.get(field)
    return prompt[0] if field == "prompt" and isinstance(prompt, list) and len(prompt) == 1 else prompt


def _with_prompt(body: Mapping[str, Any], field: str, prompt: Any) -> bytes:
    is_batch = field == "prompt" and isinstance(body[field], list)
    return json.dumps({**body, field: [prompt] if is_batch else prompt}).encode()


def _headers(pruning: Pruning) -> dict[str, str]:
    reason = pruning.reason.encode("ascii", "replace").decode()
    headers = {"x-spec-stack-reason": "".join(filter(str.isprintable, reason))[:_MAX_HEADER]}
    for part, count in pruning.counts.items():
        headers[f"x-spec-stack-{'prompt' if part == 'all' else part}-tokens"] = str(count)
    return headers
