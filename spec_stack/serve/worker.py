"""Answers queued requests in one thread, each in a session of its client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_stack.api.answering import samples
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.fair_executor import CheckCancelled, FairExecutor, RequestCancelled
from spec_stack.serve.metrics import ServerMetrics
from spec_stack.serve.protocol import CANCELLED, FAILED, BadRequestError
from spec_stack.serve.responses import Json, ResponseBuilder
from spec_stack.serve.sessions import SessionStore

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session

logger = logging.getLogger(__name__)
Answer = Json | BadRequestError


@dataclass(frozen=True)
class QueuedRequest:
    """A request to answer. deliver: called in the generating thread with each chunk of the response."""

    prompt: EncodedPrompt
    options: Mapping[str, Any]
    builder: ResponseBuilder
    deliver: Callable[[Json], None]


class Worker:
    """The generating thread, its sessions and its metrics."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig) -> None:
        self.sessions = SessionStore(generator, config.max_sessions, config.ngram_cache_tokens)
        self.metrics = ServerMetrics()
        self.queue = FairExecutor(
            "spec-stack-serve", config.max_queued, config.max_queued_per_client, self.metrics.wait_s.observe
        )
        self.metrics.gauge("requests_running", "Requests being answered", lambda: int(self.queue.is_busy))
        self.metrics.gauge("requests_waiting", "Requests in the queue", self.queue.__len__)
        self.metrics.gauge("sessions", "Conversations kept", self.sessions.__len__)

    def submit(self, client: str, request: QueuedRequest) -> asyncio.Task[Answer]:
        """Queue a request. The result is the whole response, or the error. Raises QueueFullError."""
        return self.queue.submit(client, partial(self._run, client, request))

    async def stop(self) -> None:
        """Cancel all requests; returns when the running one has ended, or after a second."""
        # A step may take longer; its session is freed with the process.
        if await self.queue.close():
            self.sessions.close()

    def _run(self, client: str, request: QueuedRequest, check_cancelled: CheckCancelled) -> Answer:
        answer: Answer
        try:
            with self.sessions.lend(client, request.prompt) as session:
                self._generate(request, session, check_cancelled)
            outcome, answer = "ok", request.builder.whole()
        except RequestCancelled:
            outcome, answer = "cancelled", BadRequestError(CANCELLED, status=503)
        except ValueError as error:
            outcome, answer = "refused", BadRequestError(str(error))
        except Exception:
            logger.exception("a request failed")
            outcome, answer = "failed", BadRequestError(FAILED, status=500)
        self.metrics.requests.labels(outcome).inc()
        return answer

    def _generate(self, request: QueuedRequest, session: Session, check_cancelled: CheckCancelled) -> None:
        """Generate all choices."""
        options = {**request.options, "on_progress": lambda *_: check_cancelled()}
        for index, choice in enumerate(samples(options, len(request.builder.choices))):
            with closing(session.stream_encoded(request.prompt, choice)) as outputs:
                for output in outputs:
                    check_cancelled()
                    for chunk in request.builder.add(index, output):
                        request.deliver(chunk)
                    if output.metrics is not None:
                        self.metrics.add(output.metrics)
