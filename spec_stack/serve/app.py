"""The application: OpenAI chat completions and completions over one generator (extra `serve`)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from spec_stack.http.app import (
    IGNORED_HEADER,
    begin,
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
from spec_stack.http.audits import Audit, Audits
from spec_stack.http.config import LOOPBACK
from spec_stack.http.errors import CANCELLED, BadRequestError
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.process_pool import RequestPool
from spec_stack.serve.processing import ProcessedRequest
from spec_stack.serve.protocol import REQUESTS
from spec_stack.serve.responses import BUILDERS, REPORT, Json
from spec_stack.serve.worker import Answer, QueuedRequest, Worker

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

logger = logging.getLogger(__name__)

_MAX_NAMED = 20


def build_app(
    generator: SpecStackGenerator, config: ServeConfig | None = None, pool: RequestPool | None = None
) -> FastAPI:
    """Build the application, whose worker (`app.state.worker`) runs from its startup to its shutdown.

    Parameters
    ----------
    generator : SpecStackGenerator
        The generator.
    config : ServeConfig, optional
        The defaults if omitted.
    pool : RequestPool, optional
        Shared with other applications, and stopped by its owner; by default the application has its own.
    """
    config = config or ServeConfig()
    worker = Worker(generator, config)
    audits = Audits(config, worker.metrics.of_app)
    requests = pool or RequestPool(generator)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(requests.start)
        auditing = asyncio.create_task(audits.run())
        yield
        auditing.cancel()
        await worker.stop()
        if pool is None:
            await run_in_threadpool(requests.stop)

    async def obstacle() -> str:
        return worker.queue.obstacle

    app = new_app(worker.metrics, lifespan, obstacle, audits.client_waits, config.cors_origins)
    app.state.worker = worker
    endpoint = Endpoint(generator, config, worker, audits, requests)
    for path in REQUESTS:
        app.add_api_route(path, partial(endpoint.answer, path), methods=["POST"], name=path)
    app.add_api_route("/v1/models", endpoint.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoint.model, methods=["GET"])
    return app


def serve(generator: SpecStackGenerator, config: ServeConfig | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have `shutdown_s` seconds left.

    In a script, call it under `if __name__ == "__main__":`, because worker processes import the script.
    """
    config = config or ServeConfig()
    begin(config, config.port)
    run(generator, config)


def run(generator: SpecStackGenerator, config: ServeConfig) -> None:
    """`serve` after `begin`."""
    if config.host not in LOOPBACK and not config.api_keys:
        logger.warning("listening on %s without an API key: whoever reaches this machine may ask", config.host)
    run_app(build_app(generator, config), config, config.port)


class Endpoint:
    """Handles an HTTP request: process, enqueue, return or stream the response."""

    def __init__(
        self, generator: SpecStackGenerator, config: ServeConfig, worker: Worker, audits: Audits, pool: RequestPool
    ) -> None:
        self._generator, self._config, self._worker, self._pool = generator, config, worker, pool
        self._audits = audits
        self._max_body_bytes = config.body_limit(generator.pair.max_positions[0])
        # A client's requests are processed one after the other.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._model = {
            "id": config.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "spec_stack",
            "max_model_len": min(generator.pair.max_positions),
        }

    async def models(self, request: Request) -> dict[str, Any]:
        """GET /v1/models."""
        client_of(request, self._config.api_keys)
        return {"object": "list", "data": [self._model]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        """GET /v1/models/{name}."""
        client_of(request, self._config.api_keys)
        if name != self._config.model_name:
            raise HTTPException(404, f"there is no model {name!r} here, only {self._config.model_name!r}")
        return self._model

    async def answer(self, path: str, request: Request) -> Response:
        """POST one of `REQUESTS`."""
        client = client_of(request, self._config.api_keys)
        body = decoded(request, await read_body(request, self._max_body_bytes), self._max_body_bytes)
        by_header = options_of_header(request)
        async with self._turns.setdefault(client, asyncio.Lock()):
            processed = await self._pool.process(path, body, self._config)
        # The body's options hold against the header's, and both against audits.
        if body_asks := not processed.options.keys().isdisjoint(("keep_rate", "sparse_prefill")):
            by_header = {}
        options = await run_in_threadpool(self._checked_options, processed, by_header)
        route = self._audits.route_of(request)
        why = "" if body_asks or by_header else self._audits.why_whole(route)
        applied = {**options, "sparse_prefill": "draft_only"} if why else options
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Json | None]()

        def deliver(chunk: Json) -> None:
            # The event loop of a stopped server is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        builder = BUILDERS[path](
            self._config.model_name, processed.parsers, self._generator.pair.token_bytes, processed.max_calls
        )
        job = self._worker.submit(client, QueuedRequest(processed.encoded, applied, builder, deliver))

        def ended(job: asyncio.Task[Answer]) -> None:
            answer = None if job.cancelled() else job.result()
            report = answer["usage"][REPORT] if isinstance(answer, dict) else None
            if report and (why or report["kept_tokens"] < report["prompt_tokens"]):
                again = partial(self._worker.answer_again, processed.encoded, options)
                self._audits.offer(Audit(route, again))

        job.add_done_callback(ended)
        headers = _ignored_header(processed.ignored)
        if processed.streams:
            job.add_done_callback(lambda _: chunks.put_nowait(None))
            return EventStream(job, chunks, builder.usage_chunk if processed.wants_usage else None, headers)
        try:
            answer = await unless_disconnected(request, job)
        except ClientDisconnect:
            answer = BadRequestError(CANCELLED, status=499)
        if isinstance(answer, BadRequestError):
            return error_response(request, answer, headers)
        report = answer["usage"][REPORT] | ({"reason": why} if why else {})
        return JSONResponse(answer, headers=headers | report_headers(report["reason"], [*report.values()][1:]))

    def _checked_options(self, processed: ProcessedRequest, by_header: Mapping[str, Any]) -> dict[str, Any]:
        """The options and those of a header, checked by the generator. Raises BadRequestError."""
        num_tokens, num_positions = len(processed.encoded.token_ids), self._generator.pair.max_positions[0]
        most = min(self._config.max_prompt_tokens or num_positions, num_positions - 1)
        if num_tokens > most:
            raise BadRequestError(f"the prompt has {num_tokens} tokens; this server takes {most}")
        room, wanted = num_positions - num_tokens, processed.options["max_tokens"]
        default = min(self._config.default_max_tokens, room)
        options = {**processed.options, **by_header, "max_tokens": room if wanted == -1 else wanted or default}
        try:
            # Only checks; work starts with the first step. The grammar has been compiled, within limits.
            self._generator.stream_encoded(processed.encoded, {**options, "response_format": None})
        except (ValueError, TypeError, OverflowError) as error:
            raise BadRequestError(str(error)) from error
        return options


class EventStream(StreamingResponse):
    """A job's chunks as server-sent events. The job is cancelled when its client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        job: asyncio.Task[Answer],
        chunks: asyncio.Queue[Json | None],
        usage_chunk: Callable[[], Json] | None,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(self._events(), headers={**headers, "cache-control": "no-cache"})
        self._job, self._chunks, self._usage_chunk = job, chunks, usage_chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()

    async def _events(self) -> AsyncGenerator[bytes]:
        """The events. Errors are events too, since the status has been sent."""
        while (chunk := await self._chunks.get()) is not None:
            yield _event(chunk)
        answer = BadRequestError(CANCELLED, status=503) if self._job.cancelled() else self._job.result()
        if isinstance(answer, BadRequestError):
            yield _event(answer.body())
            return
        if self._usage_chunk is not None:
            yield _event(self._usage_chunk())
        yield format_sse_event(data_str="[DONE]")


def _event(content: Json) -> bytes:
    return format_sse_event(data_str=json.dumps(content))


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """A header with the first ignored fields, reduced to safe characters because clients choose the names."""
    named = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII) for name in names[:_MAX_NAMED]]
    return {IGNORED_HEADER: ", ".join(named)} if named else {}
