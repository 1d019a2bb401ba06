"""One thread for the model's work, round-robin over clients."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Any, TypeVar, cast

from spec_stack.serve.protocol import BadRequestError

Result = TypeVar("Result")
_JOIN_S = 1.0


class RequestCancelled(BaseException):
    """The client disconnected. A BaseException, so that no fallback handles it."""


class QueueFullError(BadRequestError):
    """The queue is full, for this client or in total."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429)


class Job(Future[Result]):
    """A client's work. Cancelling it (also through `asyncio.wrap_future`) removes it from the queue; running work ends
    at its next `check_cancelled`."""

    def __init__(self, client: str, work: Callable[[Job[Result]], Result]) -> None:
        super().__init__()
        self.client, self._work = client, work
        self.queued_at, self.is_cancelled = monotonic(), False

    def cancel(self) -> bool:
        self.is_cancelled = True
        return super().cancel()

    def check_cancelled(self) -> None:
        """Raise RequestCancelled if the client has disconnected."""
        if self.is_cancelled:
            raise RequestCancelled

    def run(self) -> None:
        """Do the work in this thread."""
        try:
            self.set_result(self._work(self))
        except BaseException as error:
            # A traceback would keep the work's tensors.
            self.set_exception(error.with_traceback(None))


class FairExecutor:
    """Runs jobs one at a time; each client's jobs stay in order. observe_wait: called with the seconds in the queue."""

    def __init__(self, name: str, max_queued: int, max_per_client: int, observe_wait: Callable[[float], None]) -> None:
        self._max_queued, self._max_per_client, self._observe_wait = max_queued, max_per_client, observe_wait
        self._thread = ThreadPoolExecutor(1, name)
        self._clients: OrderedDict[str, deque[Job[Any]]] = OrderedDict()
        self._lock = threading.RLock()
        self._is_closed = False
        self.running: Job[Any] | None = None

    def __len__(self) -> int:
        """Jobs that wait."""
        with self._lock:
            return sum(map(len, self._clients.values()))

    def submit(self, client: str, work: Callable[[Job[Result]], Result]) -> Job[Result]:
        """Append a job to its client's queue. Raises QueueFullError."""
        job = Job(client, work)
        with self._lock:
            num_own = len(self._clients.get(client, ()))
            if self._is_closed:
                raise QueueFullError("the server is shutting down")
            if num_own >= self._max_per_client:
                raise QueueFullError(f"{num_own} requests of this client are waiting already; try again later")
            if len(self) >= self._max_queued:
                raise QueueFullError(f"{self._max_queued} requests are waiting already; try again later")
            self._clients.setdefault(client, deque()).append(job)
            self._thread.submit(self._run_next)
        job.add_done_callback(self._remove)
        return job

    def close(self) -> None:
        """Reject new jobs and cancel all others; returns when the running one has ended, or after a second."""
        with self._lock:
            self._is_closed = True
            waiting, running = [job for jobs in self._clients.values() for job in jobs], self.running
        for job in waiting:
            job.cancel()
        if running is not None:
            running.cancel()
            wait([running], _JOIN_S)
        self._thread.shutdown(wait=False)

    def _remove(self, done: Future[Any]) -> None:
        """Remove a cancelled job."""
        job = cast(Job[Any], done)
        with self._lock:
            jobs = self._clients.get(job.client, deque())
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._clients.pop(job.client, None)

    def _run_next(self) -> None:
        """Run the next job, if it has not been cancelled; its client moves to the end."""
        with self._lock:
            if not self._clients:
                return
            client, jobs = self._clients.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._clients[client] = jobs
            if not job.set_running_or_notify_cancel():
                return
            self.running = job
        self._observe_wait(monotonic() - job.queued_at)
        job.run()
        self.running = None
