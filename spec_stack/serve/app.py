"""The application: OpenAI chat completions and completions over one generator (extra `serve`)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event

from spec_stack.hf.answer_format import AnswerFormat
from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.http import IGNORED_HEADER, client_of, new_app, read_body, run_app, until_disconnect
from spec_stack.serve.process_pool import RequestPool
from spec_stack.serve.processing import ProcessedRequest
from spec_stack.serve.protocol import CANCELLED, FAILED, REQUESTS, BadRequestError, error_body, error_response
from spec_stack.serve.queue import OutputChunk, QueuedRequest, StreamItem
from spec_stack.serve.responses import BUILDERS, OutputParsers, ResponseBuilder
from spec_stack.serve.worker import Worker

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

logger = logging.getLogger(__name__)

_MAX_NAMED, _MAX_NAME = 20, 40


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
    config = (config or ServeConfig()).bounded_by(generator.pair.max_positions[0])
    worker = Worker(generator, config)
    requests = pool or RequestPool(generator)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(requests.start)
        worker.start()
        yield
        await run_in_threadpool(worker.stop)
        if pool is None:
            await run_in_threadpool(requests.stop)

    app = new_app(worker.metrics, lifespan, config.cors_origins)
    app.state.worker = worker
    endpoint = Endpoint(generator, config, worker, requests)
    for path in REQUESTS:
        app.add_api_route(path, partial(endpoint.answer, path), methods=["POST"], name=path)
    app.add_api_route("/v1/models", endpoint.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoint.model, methods=["GET"])
    return app


def serve(generator: SpecStackGenerator, config: ServeConfig | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Running requests then have `shutdown_s` seconds left, and the process is killed at most two seconds later.
    In a script, call it under `if __name__ == "__main__":`, because worker processes import the script.
    """
    config = config or ServeConfig()
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.api_keys:
        logger.warning("listening on %s without an API key: whoever reaches this machine may ask", config.host)
    run_app(build_app(generator, config), config.host, config.port, config.shutdown_s)


class Endpoint:
    """Handles an HTTP request: process, enqueue, return or stream the response."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig, worker: Worker, pool: RequestPool) -> None:
        self._generator, self._config, self._worker, self._pool = generator, config, worker, pool
        # A client's requests are processed one after the other.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._format = AnswerFormat.learn(generator.tokenizer)
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
        body = await read_body(request, self._config.max_body_bytes or 0)
        async with self._turns.setdefault(client, asyncio.Lock()):
            processed = await self._pool.process(path, body, self._config)
        options = await run_in_threadpool(self._checked_options, processed)
        loop, items = asyncio.get_running_loop(), asyncio.Queue[StreamItem]()

        def deliver(item: StreamItem) -> None:
            # The event loop of a stopped server is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(items.put_nowait, item)

        queued = QueuedRequest(client, processed.encoded, options, processed.num_choices, deliver)
        self._worker.queue.add(queued)
        stream = self._items(request, queued, items)
        builder = BUILDERS[path](self._config.model_name, processed.num_choices, self._parsers(processed))
        headers = _ignored_header(processed.ignored)
        if processed.streams:
            events = _events(stream, builder, processed.wants_usage)
            headers["cache-control"] = "no-cache"
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return await _whole(stream, builder, headers, request)

    def _parsers(self, processed: ProcessedRequest) -> OutputParsers:
        return OutputParsers(
            parser=partial(AnswerParser, self._format, processed.tool_names, processed.in_thought),
            token_bytes=self._generator.pair.token_bytes,
            max_calls=processed.max_calls,
        )

    def _checked_options(self, processed: ProcessedRequest) -> dict[str, Any]:
        """The options, checked by the generator. Raises BadRequestError."""
        num_tokens, num_positions = len(processed.encoded.token_ids), self._generator.pair.max_positions[0]
        most = min(self._config.max_prompt_tokens or num_positions, num_positions - 1)
        if num_tokens > most:
            raise BadRequestError(f"the prompt has {num_tokens} tokens; this server takes {most}")
        max_tokens = processed.max_tokens or min(self._config.default_max_tokens, num_positions - num_tokens)
        options = {**processed.options, "max_tokens": max_tokens}
        try:
            # Only checks; work starts with the first step.
            self._generator.stream_encoded(processed.encoded, options)
        except (ValueError, TypeError, OverflowError) as error:
            raise BadRequestError(str(error)) from error
        return options

    async def _items(
        self, request: Request, queued: QueuedRequest, items: asyncio.Queue[StreamItem]
    ) -> AsyncGenerator[OutputChunk | BadRequestError]:
        """The items of a queued request, which is cancelled when its client disconnects or iteration stops."""

        async def watch() -> None:
            await until_disconnect(request)
            self._worker.queue.cancel(queued)
            items.put_nowait(None)

        watcher = asyncio.create_task(watch())
        try:
            while (item := await items.get()) is not None:
                yield item
        finally:
            watcher.cancel()
            self._worker.queue.cancel(queued)


async def _whole(
    items: AsyncGenerator[OutputChunk | BadRequestError],
    builder: ResponseBuilder,
    headers: Mapping[str, str],
    request: Request,
) -> Response:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, BadRequestError):
                return error_response(item.status, item.message)
            builder.add(item)
    if not builder.is_complete:
        return error_response(499 if await request.is_disconnected() else 503, CANCELLED)
    return JSONResponse(builder.whole(), headers=headers)


async def _events(
    items: AsyncGenerator[OutputChunk | BadRequestError], builder: ResponseBuilder, wants_usage: bool
) -> AsyncGenerator[bytes]:
    """A stream's events. Errors are events too, since the status has been sent."""
    async with aclosing(items):
        async for item in items:
            if isinstance(item, BadRequestError):
                yield _error_event(item.status, item.message)
                return
            try:
                events = [_event(chunk) for chunk in builder.add(item)]
            except Exception:
                logger.exception("a chunk of a response cannot be built")
                yield _error_event(500, FAILED)
                return
            for event in events:
                yield event
    if not builder.is_complete:
        yield _error_event(503, CANCELLED)
        return
    if wants_usage:
        yield _event(builder.usage_chunk())
    yield format_sse_event(data_str="[DONE]")


def _event(content: Mapping[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(content))


def _error_event(status: int, message: str) -> bytes:
    return _event({"error": error_body(status, message)})


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """A header with the first ignored fields, reduced to safe characters because clients choose the names."""
    named = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in names[:_MAX_NAMED]]
    return {IGNORED_HEADER: ", ".join(named)} if named else {}
