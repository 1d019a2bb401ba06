"""The generating thread, one request at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, Any

from spec_stack.api.answering import samples
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.metrics import ServerMetrics
from spec_stack.serve.protocol import FAILED, BadRequestError
from spec_stack.serve.queue import OutputChunk, QueuedRequest, RequestCancelled, RequestQueue
from spec_stack.serve.sessions import SessionStore

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session

logger = logging.getLogger(__name__)

_JOIN_S = 1.0


class Worker:
    """Answers queued requests, each in a session of its client."""

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig) -> None:
        self.queue: RequestQueue[QueuedRequest] = RequestQueue(config.max_queued, config.max_queued_per_client)
        self.sessions = SessionStore(generator, config.max_sessions, config.ngram_cache_tokens)
        self.metrics = ServerMetrics(self.queue.__len__, lambda: int(self.is_busy), self.sessions.__len__)
        self._running: QueuedRequest | None = None
        self._thread = threading.Thread(target=self._work, name="spec-stack-serve", daemon=True)

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel all requests; returns when the thread has ended, or after a second."""
        self.queue.close()
        running = self._running
        if running is not None:
            running.is_cancelled.set()
        # A step may take longer; the daemon thread ends with the process.
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self.sessions.close()

    def _work(self) -> None:
        while (request := self.queue.next()) is not None:
            self._running = request
            self.metrics.wait_s.observe(monotonic() - request.queued_at)
            try:
                self.metrics.requests.labels(self._answer(request)).inc()
            finally:
                self._running = None
                request.deliver(None)

    def _answer(self, request: QueuedRequest) -> str:
        """Generate all choices of a request, and return its outcome."""
        try:
            request.check_cancelled()
            with self.sessions.lend(request.client, request.prompt) as session:
                options = {**request.options, "on_progress": lambda *_: request.check_cancelled()}
                for index, choice in enumerate(samples(options, request.num_choices)):
                    self._generate(request, session, index, choice)
        except RequestCancelled:
            return "cancelled"
        except ValueError as error:
            request.deliver(BadRequestError(str(error)))
            return "refused"
        except Exception:
            logger.exception("a request failed")
            request.deliver(BadRequestError(FAILED, status=500))
            return "failed"
        return "ok"

    def _generate(self, request: QueuedRequest, session: Session, index: int, options: Mapping[str, Any]) -> None:
        with closing(session.stream_encoded(request.prompt, options)) as outputs:
            for output in outputs:
                request.check_cancelled()
                request.deliver(OutputChunk(index, output))
                if output.metrics is not None:
                    self.metrics.add(output.metrics)
