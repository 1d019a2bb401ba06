"""One thread for the model's work, round-robin over clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from spec_stack.http.errors import BadRequestError

Result = TypeVar("Result")
CheckCancelled = Callable[[], None]
_JOIN_S = 1.0


class ClientDisconnected(BaseException):
    """The client disconnected. A BaseException, so that no fallback handles it."""


class QueueFullError(BadRequestError):
    """The queue is full, for this client or in total."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429)


class FairExecutor:
    """Runs jobs one at a time; each client's jobs stay in order. For one event loop. observe_wait: called with the
    seconds in the queue."""

    def __init__(self, name: str, max_queued: int, max_per_client: int, observe_wait: Callable[[float], None]) -> None:
        self._max_queued, self._max_per_client, self._observe_wait = max_queued, max_per_client, observe_wait
        self._thread = ThreadPoolExecutor(1, name)
        # These locks are first in, first out, and one job of each client waits for the thread: clients take turns.
        self._thread_lock = asyncio.Lock()
        self._client_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: dict[asyncio.Task[Any] | None, str] = {}
        self._running: asyncio.Task[Any] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def obstacle(self) -> str:
        """Why it takes no job; empty where it does."""
        if self._is_closed:
            return "the server is shutting down"
        return f"{len(self)} requests are waiting already; try again later" if len(self) >= self._max_queued else ""

    def is_waiting(self, job: asyncio.Task[Any]) -> bool:
        """Whether a job has not begun."""
        return job in self._waiting

    @property
    def is_busy(self) -> bool:
        return self._thread_lock.locked()

    def submit(self, client: str, work: Callable[[CheckCancelled], Result]) -> asyncio.Task[Result]:
        """Append a job to its client's queue. Raises QueueFullError.

        Cancelling the task removes the job from the queue. Running work ends when it next calls its argument, which
        raises ClientDisconnected.
        """
        num_own = [*self._waiting.values()].count(client)
        if self.obstacle:
            raise QueueFullError(self.obstacle)
        if num_own >= self._max_per_client:
            raise QueueFullError(f"{num_own} requests of this client are waiting already; try again later")
        job = asyncio.create_task(self._run(client, work))
        self._waiting[job] = client
        job.add_done_callback(lambda job: self._waiting.pop(job, None))
        return job

    async def close(self) -> bool:
        """Reject new jobs and cancel all others. Returns whether the running one has ended within a second."""
        self._is_closed = True
        for job in (*self._waiting, self._running):
            if job is not None:
                job.cancel()
        try:
            await asyncio.wait_for(self._thread_lock.acquire(), _JOIN_S)
        except TimeoutError:
            return False
        finally:
            self._thread.shutdown(wait=False)
        self._thread_lock.release()
        return True

    async def _run(self, client: str, work: Callable[[CheckCancelled], Result]) -> Result:
        queued_at, loop = monotonic(), asyncio.get_running_loop()
        async with self._client_locks.setdefault(client, asyncio.Lock()):
            await self._thread_lock.acquire()
        self._running = asyncio.current_task()
        self._waiting.pop(self._running, None)
        self._observe_wait(monotonic() - queued_at)
        is_over = threading.Event()

        def check_cancelled() -> None:
            if is_over.is_set():
                raise ClientDisconnected

        def release(_: object) -> None:
            # The event loop of a stopped server is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._thread_lock.release)

        # The context has the request's id, for log lines.
        running = self._thread.submit(copy_context().run, work, check_cancelled)
        # Cancelled work keeps the thread until it ends.
        running.add_done_callback(release)
        try:
            return await asyncio.wrap_future(running)
        except Exception as error:
            # A traceback would keep the work's tensors.
            error.with_traceback(None)
            raise
        finally:
            is_over.set()
