"""The endpoint: OpenAI's chats and completions over one generator. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import PromptTokensDetails
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_stack.hf.prompt import PromptSource, encode_prompt
from spec_stack.serve.bodies import Body, ChatBody, CompletionBody
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.line import Delivery, Failure, Job, LineFull, Piece
from spec_stack.serve.worker import Worker
from spec_stack.types import Metrics

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}
_FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}


def build_app(generator: SpecStackGenerator, config: ServeConfig | None = None) -> FastAPI:
    """The application, whose worker runs from its startup to its shutdown (`app.state.worker`)."""
    config = config or ServeConfig()
    worker = Worker(generator, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.stop)

    app = FastAPI(title="spec_stack", lifespan=lifespan, docs_url=None, redoc_url=None)
    # FastAPI's own max_body_size answers in plain text, where clients look for OpenAI's form.
    app.add_middleware(RefuseLongBodies, max_bytes=config.max_body_bytes)
    app.state.worker = worker
    endpoint = Endpoint(generator, config, worker)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return await endpoint.answer(request, body, ChatForm)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionBody) -> Response:
        return await endpoint.answer(request, body, CompletionForm)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        endpoint.client(request)
        model = {"id": config.model_name, "object": "model", "created": endpoint.started, "owned_by": "spec_stack"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return _error(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def unfit(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _error(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, "the server could not answer this request; its log says why")

    return app


class RefuseLongBodies:
    """Refuses requests by the length that they declare, without reading them, or once they have grown too long."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if length.isdigit() and int(length) > self._max_bytes:
            refusal = _error(413, f"the body has {length} bytes; this server takes {self._max_bytes}")
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, f"the body is longer than this server takes, {self._max_bytes} bytes")
            return message

        await self._app(scope, count, send)


def serve(generator: SpecStackGenerator, config: ServeConfig | None = None) -> None:
    """Serve until the process is told to end (Ctrl-C, SIGTERM); what runs then has `shutdown_s` left."""
    config = config or ServeConfig()
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.api_keys:
        logger.warning("listening on %s without an API key: whoever reaches this machine may ask", config.host)
    uvicorn.run(
        build_app(generator, config),
        host=config.host,
        port=config.port,
        timeout_graceful_shutdown=round(config.shutdown_s),
    )


class Endpoint:
    """Checks requests, puts them in the line, and gives back what comes of them."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig, worker: Worker) -> None:
        self._generator, self._config, self._worker = generator, config, worker
        self.started = int(time.time())

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

    async def answer(self, request: Request, body: Body, form: type[Form]) -> Response:
        """Answer a request, whole or in pieces."""
        client = self.client(request)
        if body.model not in (None, self._config.model_name):
            raise HTTPException(404, f"there is no model {body.model!r} here, only {self._config.model_name!r}")
        try:
            prompt, options = await run_in_threadpool(self._check, body)
        except (ValueError, TypeError) as error:
            self._worker.meters.requests.labels("refused").inc()
            raise HTTPException(400, str(error)) from error
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Delivery]()

        def deliver(delivery: Delivery) -> None:
            # The loop of a server that has ended is closed, and then nobody waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, delivery)

        job = Job(client, prompt, options, body.n, deliver)
        try:
            self._worker.line.join(job)
        except LineFull as error:
            self._worker.meters.requests.labels("refused").inc()
            raise HTTPException(429, str(error), headers={"Retry-After": "1"}) from error
        answer = form(self._config.model_name, body.n)
        if body.stream:
            pieces = self._pieces(request, job, arrived, answer, body.wants_usage)
            return StreamingResponse(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async with aclosing(self._deliveries(request, job, arrived)) as deliveries:
            async for delivery in deliveries:
                if isinstance(delivery, Failure):
                    return _error(400 if delivery.is_callers else 500, delivery.message)
                answer.take(delivery)
        if not answer.is_complete:
            return _error(499 if await request.is_disconnected() else 503, "the request was cancelled")
        return JSONResponse(answer.whole().model_dump(mode="json", exclude_none=True))

    def _check(self, body: Body) -> tuple[dict[str, Any], dict[str, Any]]:
        """The prompt and the options of a request, everything of which has been checked.

        Raises
        ------
        ValueError
            For what the caller can change.
        """
        generator, config = self._generator, self._config
        prompt, options = body.prompt_options(), body.options(config)
        num_tokens = len(
            encode_prompt(generator.tokenizer, generator.pair.vocab_size, PromptSource(**prompt)).token_ids
        )
        room = min(generator.pair.max_positions) - num_tokens
        if room < 1 or num_tokens > (config.max_prompt_tokens or num_tokens):
            most = min(config.max_prompt_tokens or num_tokens, min(generator.pair.max_positions) - 1)
            raise ValueError(f"the prompt has {num_tokens} tokens; this server takes {most}")
        options["max_tokens"] = body.limit() or min(config.default_max_tokens, room)
        # Checks all the rest, and does nothing until its first step.
        generator.stream(**prompt, **options)
        return prompt, options

    async def _deliveries(
        self, request: Request, job: Job, arrived: asyncio.Queue[Delivery]
    ) -> AsyncGenerator[Piece | Failure]:
        """What comes of a job, which is cancelled once nobody waits for it any more."""
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
                    yield _event_of({"error": _error_body(status, delivery.message)})
                    return
                for chunk in answer.pieces(delivery):
                    yield _event(chunk)
        if not answer.is_complete:
            yield _event_of({"error": _error_body(503, "the request was cancelled")})
            return
        if wants_usage:
            yield _event(answer.last())
        yield format_sse_event(data_str="[DONE]")


async def _cancel_on_disconnect(request: Request, job: Job) -> None:
    """Wait until the client has gone; the body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.is_cancelled.set()


@dataclass
class Choice:
    """One answer as it grows."""

    text: str = ""
    finish_reason: str | None = None
    metrics: Metrics | None = None


@dataclass
class Form:
    """How answers look on the wire."""

    model: str
    num_choices: int
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.choices = [Choice() for _ in range(self.num_choices)]

    prefix = "answer"

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def take(self, piece: Piece) -> Choice:
        """Take in a step."""
        choice, output = self.choices[piece.index], piece.output
        choice.text += output.text
        if output.finish_reason is not None:
            choice.finish_reason, choice.metrics = _FINISHED[output.finish_reason], output.metrics
        return choice

    def usage(self) -> CompletionUsage:
        """Tokens in and out; a prompt counts once for all its answers."""
        costs = [choice.metrics for choice in self.choices if choice.metrics is not None]
        num_prompt, num_new = costs[0].num_prompt_tokens, sum(cost.num_tokens for cost in costs)
        return CompletionUsage(
            prompt_tokens=num_prompt,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=costs[0].num_cached_tokens),
        )

    def head(self) -> dict[str, Any]:
        """What every object says first."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def whole(self) -> BaseModel:
        """The answers in one piece."""
        raise NotImplementedError

    def pieces(self, piece: Piece) -> list[BaseModel]:
        """What a step sends."""
        raise NotImplementedError

    def last(self) -> BaseModel:
        """A piece that says only what it all cost."""
        raise NotImplementedError


class ChatForm(Form):
    """Of chats."""

    prefix = "chatcmpl"

    def whole(self) -> BaseModel:
        choices = [
            {
                "index": index,
                "finish_reason": choice.finish_reason,
                "message": {"role": "assistant", "content": choice.text},
            }
            for index, choice in enumerate(self.choices)
        ]
        return ChatCompletion.model_validate(
            self.head() | {"object": "chat.completion", "choices": choices, "usage": self.usage()}
        )

    def _chunk(self, choices: list[dict[str, Any]], usage: CompletionUsage | None = None) -> BaseModel:
        return ChatCompletionChunk.model_validate(
            self.head() | {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
        )

    def pieces(self, piece: Piece) -> list[BaseModel]:
        is_first = not self.choices[piece.index].text and piece.output.record.is_prefill
        choice = self.take(piece)
        delta = {"content": piece.output.text} | ({"role": "assistant"} if is_first else {})
        if not piece.output.text and choice.finish_reason is None and not is_first:
            return []
        return [self._chunk([{"index": piece.index, "delta": delta, "finish_reason": choice.finish_reason}])]

    def last(self) -> BaseModel:
        return self._chunk([], self.usage())


class CompletionForm(Form):
    """Of completions, whose pieces look like the whole."""

    prefix = "cmpl"

    def _object(self, choices: list[dict[str, Any]], usage: CompletionUsage | None = None) -> BaseModel:
        return Completion.model_construct(**self.head(), object="text_completion", choices=choices, usage=usage)

    def whole(self) -> BaseModel:
        choices = [
            {"index": index, "text": choice.text, "finish_reason": choice.finish_reason}
            for index, choice in enumerate(self.choices)
        ]
        return self._object(choices, self.usage())

    def pieces(self, piece: Piece) -> list[BaseModel]:
        choice = self.take(piece)
        if not piece.output.text and choice.finish_reason is None:
            return []
        return [
            self._object([{"index": piece.index, "text": piece.output.text, "finish_reason": choice.finish_reason}])
        ]

    def last(self) -> BaseModel:
        return self._object([], self.usage())


def _event(chunk: BaseModel) -> bytes:
    return format_sse_event(data_str=chunk.model_dump_json(exclude_unset=True))


def _event_of(content: Mapping[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(content))


def _error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": status}


def _error(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": _error_body(status, message, param)}, status_code=status, headers=headers)
