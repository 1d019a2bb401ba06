"""The endpoint: OpenAI's chats and completions over one generator. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from spec_stack.hf.answer_format import AnswerFormat
from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.serve.bodies import BODIES, MAX_CALLS
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.errors import error_body, error_response
from spec_stack.serve.forms import FORMS, Form, Parts
from spec_stack.serve.limits import RefuseLongBodies
from spec_stack.serve.line import Delivery, Failure, Job, LineFull, Piece
from spec_stack.serve.preparation import Nursery, Preparer
from spec_stack.serve.preparing import Prepared, Refused, Settings
from spec_stack.serve.worker import Worker

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

logger = logging.getLogger(__name__)

# Fields that a request brought and that mean nothing here are named in this header.
IGNORED_HEADER = "x-spec-stack-ignored"
_MAX_NAMED, _MAX_NAME = 20, 40
_FAILED = "the server could not answer this request; its log says why"
# Seconds after shutdown_s in which the server ends by itself, before it is ended.
_GRACE_S = 1.5


def build_app(
    generator: SpecStackGenerator, config: ServeConfig | None = None, nursery: Nursery | None = None
) -> FastAPI:
    """Build the application, whose worker runs from its startup to its shutdown (`app.state.worker`).

    Parameters
    ----------
    generator : SpecStackGenerator
        Answers.
    config : ServeConfig, optional
        The defaults where it is left out.
    nursery : Nursery, optional
        Shared with others, who end it; else the application has its own.
    """
    config = (config or ServeConfig()).bounded_by(generator.pair.max_positions[0])
    worker = Worker(generator, config)
    owned = nursery is None
    nursery = nursery or open_nursery(generator)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nursery.start()
        worker.start()
        yield
        if owned:
            nursery.stop()
        await run_in_threadpool(worker.stop)

    app = FastAPI(title="spec_stack", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    # FastAPI's own max_body_size answers in plain text, where clients look for OpenAI's form.
    app.add_middleware(RefuseLongBodies, max_bytes=config.max_body_bytes or 0)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER],
        )
    app.state.worker = worker
    endpoint = Endpoint(generator, config, worker, nursery)

    for path in BODIES:
        app.add_api_route(path, partial(endpoint.answer, path), methods=["POST"], name=path)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        endpoint.client(request)
        return {"object": "list", "data": [endpoint.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        endpoint.client(request)
        if name != config.model_name:
            raise HTTPException(404, f"there is no model {name!r} here, only {config.model_name!r}")
        return endpoint.model()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Refused)
    async def unfit(request: Request, error: Refused) -> Response:
        worker.meters.requests.labels("refused").inc()
        return error_response(error.status, error.message, error.param)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, _FAILED)

    return app


def open_nursery(generator: SpecStackGenerator) -> Nursery:
    """Return the process, not begun yet, that prepares requests to a generator."""
    pair = generator.pair
    return Nursery(Settings(pair.tokenizer, pair.vocab_size, pair.end_ids))


def serve(generator: SpecStackGenerator, config: ServeConfig | None = None) -> None:
    """Serve until the process is told to end (Ctrl-C, SIGTERM).

    What runs then has `shutdown_s` left. The process ends within two seconds after that, whatever still runs in it.
    """
    config = config or ServeConfig()
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.api_keys:
        logger.warning("listening on %s without an API key: whoever reaches this machine may ask", config.host)
    settings = uvicorn.Config(
        build_app(generator, config),
        host=config.host,
        port=config.port,
        timeout_graceful_shutdown=max(1, round(config.shutdown_s)),
    )
    PunctualServer(settings, config.shutdown_s + _GRACE_S).run()


class PunctualServer(uvicorn.Server):
    """One that ends in time: a thread deep in a library hears of no signal.

    Parameters
    ----------
    config : uvicorn.Config
        Its settings.
    end_s : float
        Seconds between a signal and the end of the process.
    """

    def __init__(self, config: uvicorn.Config, end_s: float) -> None:
        super().__init__(config)
        self._end_s = end_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            timer = threading.Timer(self._end_s, self._end, [128 + sig])
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)

    def _end(self, status: int) -> None:
        logger.warning("ended with a request still running, %.1f s after the signal", self._end_s)
        logging.shutdown()
        os._exit(status)


class Endpoint:
    """Has requests prepared, puts them in the line, and gives back what comes of them."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig, worker: Worker, nursery: Nursery) -> None:
        self._generator, self._config, self._worker = generator, config, worker
        self._preparer = Preparer(nursery, config)
        self._format = AnswerFormat.learn(generator.tokenizer)
        self.started = int(time.time())

    def model(self) -> dict[str, Any]:
        """Return what there is to know of the model."""
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "spec_stack",
            "max_model_len": min(self._generator.pair.max_positions),
        }

    def client(self, request: Request) -> str:
        """Whose request this is: by its key, or where none is wanted and none brought, by its address.

        Raises
        ------
        HTTPException
            401 where a key is wanted and none of them brought.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        brought = key if scheme.lower() == "bearer" else ""
        if self._config.api_keys and not any(
            secrets.compare_digest(brought.encode(), known.encode()) for known in self._config.api_keys
        ):
            raise HTTPException(401, "this server wants an API key: Authorization: Bearer …")
        if brought:
            # Kept as long as the client's sessions are: the key itself need not be.
            return "key " + hashlib.sha256(brought.encode()).hexdigest()
        return "address " + (request.client.host if request.client else "")

    async def answer(self, path: str, request: Request) -> Response:
        """Answer a request, whole or in pieces."""
        client = self.client(request)
        try:
            body = await request.body()
        except ClientDisconnect:
            return error_response(499, "the request was cancelled")
        prepared = await self._preparer.prepare(client, path, body)
        options = await run_in_threadpool(self._check, prepared)
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Delivery]()

        def deliver(delivery: Delivery) -> None:
            # The loop of a server that has ended is closed, and then nobody waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, delivery)

        job = Job(client, prepared.encoded, options, prepared.num_choices, deliver)
        try:
            self._worker.line.join(job)
        except LineFull as error:
            self._worker.meters.requests.labels("refused").inc()
            raise HTTPException(429, str(error), headers={"Retry-After": "1"}) from error
        answer = FORMS[path](self._config.model_name, prepared.num_choices, self._parts(prepared))
        headers = _ignored_header(prepared.ignored)
        if prepared.streams:
            pieces = self._pieces(request, job, arrived, answer, prepared.wants_usage)
            headers["cache-control"] = "no-cache"
            return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)
        async with aclosing(self._deliveries(request, job, arrived)) as deliveries:
            async for delivery in deliveries:
                if isinstance(delivery, Failure):
                    return error_response(400 if delivery.is_callers else 500, delivery.message)
                answer.take(delivery)
        if not answer.is_complete:
            return error_response(499 if await request.is_disconnected() else 503, "the request was cancelled")
        return JSONResponse(answer.whole().model_dump(mode="json", exclude_unset=True), headers=headers)

    def _parts(self, prepared: Prepared) -> Parts:
        return Parts(
            parser=partial(AnswerParser, self._format, prepared.tool_names, prepared.in_thought),
            token_bytes=self._generator.pair.token_bytes,
            max_calls=prepared.options.get(MAX_CALLS),
        )

    def _check(self, prepared: Prepared) -> dict[str, Any]:
        """The options of a request, everything of which has been checked.

        Raises
        ------
        Refused
            For what the caller can change.
        """
        generator, config = self._generator, self._config
        num_tokens = len(prepared.encoded.token_ids)
        room = generator.pair.max_positions[0] - num_tokens
        if room < 1 or num_tokens > (config.max_prompt_tokens or num_tokens):
            most = min(config.max_prompt_tokens or num_tokens, generator.pair.max_positions[0] - 1)
            raise Refused(f"the prompt has {num_tokens} tokens; this server takes {most}")
        max_tokens = prepared.max_tokens or min(config.default_max_tokens, room)
        options = {**prepared.options, "max_tokens": max_tokens}
        options.pop(MAX_CALLS, None)
        try:
            # Checks all the rest, and does nothing until its first step.
            generator.stream_encoded(prepared.encoded, options)
        except (ValueError, TypeError, OverflowError) as error:
            raise Refused(str(error)) from error
        return options

    async def _deliveries(
        self, request: Request, job: Job, arrived: asyncio.Queue[Delivery]
    ) -> AsyncGenerator[Piece | Failure]:
        """Return what comes of a job, which is cancelled once nobody waits for it any more."""
        watcher = asyncio.create_task(_cancel_on_disconnect(request, job))
        try:
            while True:
                getter = asyncio.create_task(arrived.get())
                await asyncio.wait({getter, watcher}, return_when=asyncio.FIRST_COMPLETED)
                if not getter.done():
                    getter.cancel()
                    return
                delivery = getter.result()
                if delivery is None:
                    return
                yield delivery
        finally:
            watcher.cancel()
            job.is_cancelled.set()
            self._worker.line.leave(job)

    async def _pieces(
        self, request: Request, job: Job, arrived: asyncio.Queue[Delivery], answer: Form, wants_usage: bool
    ) -> AsyncGenerator[bytes]:
        """The events of a stream."""
        async with aclosing(self._deliveries(request, job, arrived)) as deliveries:
            async for delivery in deliveries:
                if isinstance(delivery, Failure):
                    status = 400 if delivery.is_callers else 500
                    yield _event_of({"error": error_body(status, delivery.message)})
                    return
                try:
                    events = [_event(chunk) for chunk in answer.pieces(delivery)]
                except Exception:
                    # The status has been sent: an event is the last way to tell a client.
                    logger.exception("a piece of an answer cannot be sent")
                    yield _event_of({"error": error_body(500, _FAILED)})
                    return
                for event in events:
                    yield event
        if not answer.is_complete:
            yield _event_of({"error": error_body(503, "the request was cancelled")})
            return
        if wants_usage:
            yield _event(answer.last())
        yield format_sse_event(data_str="[DONE]")


async def _cancel_on_disconnect(request: Request, job: Job) -> None:
    """Wait until the client has gone; the body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.is_cancelled.set()


def _event(chunk: BaseModel) -> bytes:
    return format_sse_event(data_str=chunk.model_dump_json(exclude_unset=True))


def _event_of(content: Mapping[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(content))


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields; they come from strangers, so no more than letters of some go into it."""
    named = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in names[:_MAX_NAMED]]
    return {IGNORED_HEADER: ", ".join(named)} if named else {}
