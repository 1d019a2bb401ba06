"""The application: an upstream server's API, with prompts pruned on the way (extra `serve`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpcore2
from fastapi import FastAPI, Request
from fastapi.responses import Response

from spec_stack.api.pruner import Pruner
from spec_stack.api.request_body import BodyPrompt, find_prompt
from spec_stack.http.app import (
    client_of,
    decoded,
    error_response,
    new_app,
    options_of_header,
    read_body,
    report_headers,
    run_app,
    unless_disconnected,
)
from spec_stack.http.audits import AUDITOR, Audit, Audits, Words
from spec_stack.http.config import LOOPBACK
from spec_stack.http.errors import BadRequestError
from spec_stack.proxy.audits import answer_again
from spec_stack.proxy.config import PRUNED, ProxyConfig
from spec_stack.proxy.pruning import (
    OPTIONS_FIELD,
    PromptPruner,
    PruneOptions,
    Pruning,
    body_options,
    refuse_misplaced,
)
from spec_stack.proxy.upstream import Upstream, UpstreamError, UpstreamResponse

logger = logging.getLogger(__name__)

# Fields under which the answer holds the prompt, or goes on inside it or from text that the server keeps.
_WHOLE_FIELDS = ("echo", "suffix", "prompt_logprobs", "previous_response_id", "conversation")
_NOT_JSON = "the body is not JSON"
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_CHECK_S = 2.0


def build_app(pruner: Pruner, config: ProxyConfig) -> FastAPI:
    """Build the proxy, whose scoring thread runs from its startup to its shutdown."""
    prompts, upstream = PromptPruner(pruner, config), Upstream(config)
    audits = Audits(config, prompts.metrics.of_app)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        auditing = asyncio.create_task(audits.run())
        yield
        auditing.cancel()
        await prompts.stop()
        await upstream.close()

    async def obstacle() -> str:
        return await upstream.obstacle(_CHECK_S)

    app = new_app(prompts.metrics, lifespan, obstacle, audits.client_waits)
    app.add_route("/{path:path}", ProxyEndpoint(prompts, upstream, audits, config).answer, methods=_METHODS)
    return app


def serve_proxy(pruner: Pruner, config: ProxyConfig) -> None:
    """Run the proxy until Ctrl-C or SIGTERM. Running requests then have `shutdown_s` seconds left."""
    if config.host not in LOOPBACK:
        logger.warning("listening on %s: whoever reaches this machine reaches %s", config.host, config.upstream)
    app = build_app(pruner, config)
    asyncio.run(_check(config))
    # Upstream's own Server and Date headers are passed on.
    settings = {"limit_concurrency": config.max_connections, "server_header": False, "date_header": False}
    run_app(app, config, config.port, **settings)


async def _check(config: ProxyConfig) -> None:
    """Warn if the upstream server does not answer yet."""
    upstream = Upstream(config)
    if why := await upstream.obstacle(_CHECK_S):
        logger.warning("%s does not answer yet: %s", config.upstream, why)
    await upstream.close()


class ProxyEndpoint:
    """Handles an HTTP request: prune its prompt, forward it, pass the response on."""

    def __init__(self, prompts: PromptPruner, upstream: Upstream, audits: Audits, config: ProxyConfig) -> None:
        self._prompts, self._upstream, self._audits, self._config = prompts, upstream, audits, config
        self._outcomes = prompts.metrics.requests

    async def answer(self, request: Request) -> Response:
        """Any request. It is cancelled when its client disconnects."""
        body = await read_body(request, self._config.max_body_bytes)
        return await unless_disconnected(request, asyncio.create_task(self._forward(request, body)))

    async def _forward(self, request: Request, body: bytes) -> Response:
        forwarded, headers, audit = await self._pruned(request, body)
        try:
            response = await self._upstream.send(request, forwarded, is_changed=forwarded is not body)
        except UpstreamError as problem:
            logger.warning("upstream did not answer: %r", problem)
            self._outcomes.labels("failed").inc()
            is_late = isinstance(problem, httpcore2.TimeoutException)
            why = " in time" if is_late else "; the proxy's log says why"
            error = BadRequestError(f"the upstream server did not answer{why}", status=504 if is_late else 502)
            return error_response(request, error, headers)
        self._outcomes.labels("ok").inc()
        on_end = partial(self._audits.offer, audit) if audit is not None and response.status == 200 else None
        return UpstreamResponse(response, headers, on_end)

    async def _pruned(self, request: Request, body: bytes) -> tuple[bytes, dict[str, str], Audit | None]:
        """The body to forward, headers that say what was done, and what an audit of its answer would do."""
        path = request.url.path.rstrip("/")
        field = next((field for end, field in PRUNED.items() if path.endswith(end)), None)
        if field is None or request.method != "POST":
            reason = f"off: only POST to paths that end with {', '.join(PRUNED)} is pruned"
            return body, report_headers(reason), None
        by_header = options_of_header(request)
        keep_rate = 1.0 if by_header.get("sparse_prefill") == "off" else by_header.get("keep_rate")
        options = PruneOptions.model_validate({"keep_rate": keep_rate})
        try:
            parsed = _parsed(decoded(request, body, self._config.max_parsed_bytes))
        except BadRequestError as error:
            reason = "the body is too long to parse" if error.status == 413 else error.message
            return body, self._report(Pruning("unread", f"off: {reason}")), None
        refuse_misplaced(parsed)
        if OPTIONS_FIELD in parsed:
            # Upstream does not get the field, null or not.
            options, body = body_options(parsed.pop(OPTIONS_FIELD), options), _written(parsed)
        try:
            prompt = _prunable(parsed, field)
        except ValueError as error:
            return body, self._report(Pruning("unread", f"off: {error}")), None
        route, client = self._audits.route_of(request), client_of(request, ())
        why = "" if options.keep_rate is not None else self._audits.why_whole(route)
        pruning = Pruning("audited", why) if why else await self._prompts.prune(client, prompt.chat, options)
        if pruning.prompt is not None:
            body = json.dumps(prompt.shortened(pruning.prompt)).encode()
        audit = Audit(route, partial(self._answered_again, request, prompt, options, pruning))
        return body, self._report(pruning), audit if why or pruning.prompt is not None else None

    async def _answered_again(
        self, request: Request, prompt: BodyPrompt, options: PruneOptions, pruning: Pruning
    ) -> tuple[Words, Words] | None:
        """Answers to the whole and to the pruned prompt, for an audit; None where nothing is pruned."""
        if pruning.prompt is None:
            pruning = await self._prompts.prune(AUDITOR, prompt.chat, options)
        if pruning.prompt is None:
            return None
        whole = await answer_again(self._upstream, request, prompt.body)
        return whole, await answer_again(self._upstream, request, prompt.shortened(pruning.prompt))

    def _report(self, pruning: Pruning) -> dict[str, str]:
        self._prompts.metrics.add(pruning)
        return report_headers(pruning.reason, pruning.counts.values())


def _parsed(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises BadRequestError."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(_NOT_JSON) from None
    if not isinstance(parsed, dict):
        raise BadRequestError("the body is not a JSON object")
    return parsed


def _written(body: dict[str, Any]) -> bytes:
    """A body as JSON. Raises BadRequestError for NaN and 1e999, which cannot be written again."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError:
        raise BadRequestError(_NOT_JSON) from None


def _prunable(body: dict[str, Any], field: str) -> BodyPrompt:
    """The prompt of a body. Raises ValueError with the reason why it is forwarded whole."""
    try:
        _written(body)
    except BadRequestError as error:
        raise ValueError(error.message) from error
    for name in _WHOLE_FIELDS:
        if body.get(name) is not None and body[name] is not False:
            raise ValueError(f"{name} is about the whole prompt")
    return find_prompt(body, field)
