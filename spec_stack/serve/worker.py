"""The one thread that answers requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, Any

from spec_stack.api.answering import samples
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.line import Cancelled, Failure, Job, Line, Piece
from spec_stack.serve.meters import Meters
from spec_stack.serve.sessions import SessionStore

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session

logger = logging.getLogger(__name__)

_JOIN_S = 1.0


class Worker:
    """Answers the requests of a line, one at a time, each over a session of its client's.

    Parameters
    ----------
    generator : SpecStackGenerator
        Answers.
    config : ServeConfig
        The bounds of line and sessions.
    """

    def __init__(self, generator: SpecStackGenerator, config: ServeConfig) -> None:
        self.line = Line(config.max_queued, config.max_queued_per_client)
        self.sessions = SessionStore(generator, config.max_sessions, config.remembered_tokens)
        self.meters = Meters(self.line.__len__, self.sessions.__len__)
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._work, name="spec-stack-serve", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Return whether a request is being answered."""
        return self._running is not None

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what waits and what runs, and return when the thread has ended, or a second later."""
        self.line.close()
        running = self._running
        if running is not None:
            running.is_cancelled.set()
        # A step may take longer than anybody should wait; the thread is a daemon's, and ends with the process.
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self.sessions.close()

    def _work(self) -> None:
        while (job := self.line.next()) is not None:
            self._running = job
            self.meters.running.set(1)
            try:
                self._answer(job)
            finally:
                self._running = None
                self.meters.running.set(0)
                job.deliver(None)

    def _answer(self, job: Job) -> None:
        self.meters.wait_s.observe(monotonic() - job.joined_at)
        outcome = "ok"
        try:
            _check(job)
            with self.sessions.lend(job.client, job.prompt) as session:
                options = {**job.options, "on_progress": lambda *_: _check(job)}
                for index, choice in enumerate(samples(options, job.num_choices)):
                    self._choose(job, session, index, choice)
        except Cancelled:
            outcome = "cancelled"
        except ValueError as error:
            outcome = "refused"
            job.deliver(Failure(str(error), is_callers=True))
        except Exception:
            # What went wrong is nothing that a client should see, and no reason to answer nobody else.
            outcome = "failed"
            logger.exception("a request failed")
            job.deliver(Failure("the server could not answer this request; its log says why", is_callers=False))
        self.meters.requests.labels(outcome).inc()

    def _choose(self, job: Job, session: Session, index: int, options: Mapping[str, Any]) -> None:
        with closing(session.stream_encoded(job.prompt, options)) as outputs:
            for output in outputs:
                _check(job)
                job.deliver(Piece(index, output))
                if output.metrics is not None:
                    self.meters.add(output.metrics)


def _check(job: Job) -> None:
    if job.is_cancelled.is_set():
        raise Cancelled
