"""Who is answered next: clients take turns, whoever asks most."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.types import StepOutput


class Cancelled(BaseException):
    """Ends a request whose client has gone. No Exception, so that no fall-back takes it for a failure."""


@dataclass(frozen=True)
class Piece:
    """A step of one of a request's answers."""

    index: int
    output: StepOutput


@dataclass(frozen=True)
class Failure:
    """Why a request ends without an answer. is_callers: whether the caller can change it."""

    message: str
    is_callers: bool


Delivery = Piece | Failure | None
"""An answer's next piece; None after the last."""


@dataclass(eq=False)
class Job:
    """A request in the line.

    Parameters
    ----------
    client : str
        Whose it is.
    prompt : EncodedPrompt
        The prompt.
    options : mapping
        Options of `Session.stream`.
    num_choices : int
        Answers asked for.
    deliver : callable
        Takes what comes back; called in the thread that answers.
    """

    client: str
    prompt: EncodedPrompt
    options: Mapping[str, Any]
    num_choices: int
    deliver: Callable[[Delivery], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    joined_at: float = field(default_factory=monotonic)


class LineFull(Exception):  # noqa: N818 - a state, no mistake of anybody's
    """No more requests can wait, of this client or of all."""


class Line:
    """Waiting requests, handed out client by client in turn, each client's in the order in which they came.

    Parameters
    ----------
    max_jobs, max_per_client : int
        Most that wait, of all clients and of one.
    """

    def __init__(self, max_jobs: int, max_per_client: int) -> None:
        self._max_jobs, self._max_per_client = max_jobs, max_per_client
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._clients.values()))

    def join(self, job: Job) -> None:
        """Put a request at the end of its client's. Raises LineFull."""
        with self._changed:
            waiting = self._clients.get(job.client, ())
            if self._is_closed:
                raise LineFull("the server is shutting down")
            if len(waiting) >= self._max_per_client:
                raise LineFull(f"{len(waiting)} requests of this client are waiting already; try again later")
            if sum(map(len, self._clients.values())) >= self._max_jobs:
                raise LineFull(f"{self._max_jobs} requests are waiting already; try again later")
            self._clients.setdefault(job.client, deque()).append(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Take a request out again, where it still waits."""
        with self._changed:
            jobs = self._clients.get(job.client)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._clients[job.client]

    def next(self) -> Job | None:
        """Wait for a request and take it; its client goes to the end. None once the line is closed and empty."""
        with self._changed:
            while not self._clients:
                if self._is_closed:
                    return None
                self._changed.wait()
            client, jobs = self._clients.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._clients[client] = jobs
            return job

    def close(self) -> None:
        """Take no more, and cancel those that wait."""
        with self._changed:
            self._is_closed = True
            for jobs in self._clients.values():
                for job in jobs:
                    job.is_cancelled.set()
            self._changed.notify_all()
