"""The request queue: clients take turns, however many requests each of them sends."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.types import StepOutput


class RequestCancelled(BaseException):
    """The client has disconnected. Not an Exception, so that no fall-back handles it."""


class QueueFullError(Exception):
    """The queue takes no more requests, of this client or of all."""


@dataclass(frozen=True)
class OutputChunk:
    """A step of one of a request's choices."""

    index: int
    output: StepOutput


@dataclass(frozen=True)
class RequestError:
    """Why a request ended without an answer, and its HTTP status."""

    status: int
    message: str


StreamItem = OutputChunk | RequestError | None
"""None after the last."""


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue. `deliver` is called in the thread that generates."""

    client: str
    prompt: EncodedPrompt
    options: Mapping[str, Any]
    num_choices: int
    deliver: Callable[[StreamItem], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    queued_at: float = field(default_factory=monotonic)

    def check_cancelled(self) -> None:
        """Raise RequestCancelled where the client has disconnected."""
        if self.is_cancelled.is_set():
            raise RequestCancelled


class RequestQueue:
    """Requests by client, handed out round-robin; the requests of one client stay in order."""

    def __init__(self, max_queued: int, max_per_client: int) -> None:
        self._max_queued, self._max_per_client = max_queued, max_per_client
        self._clients: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._clients.values()))

    def add(self, request: QueuedRequest) -> None:
        """Append a request to its client's. Raises QueueFullError."""
        with self._changed:
            waiting = self._clients.get(request.client, ())
            if self._is_closed:
                raise QueueFullError("the server is shutting down")
            if len(waiting) >= self._max_per_client:
                raise QueueFullError(f"{len(waiting)} requests of this client are waiting already; try again later")
            if sum(map(len, self._clients.values())) >= self._max_queued:
                raise QueueFullError(f"{self._max_queued} requests are waiting already; try again later")
            self._clients.setdefault(request.client, deque()).append(request)
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """Cancel a request, waiting or not."""
        request.is_cancelled.set()
        with self._changed:
            requests = self._clients.get(request.client)
            if requests is not None and request in requests:
                requests.remove(request)
                if not requests:
                    del self._clients[request.client]

    def next(self) -> QueuedRequest | None:
        """Wait for a request and remove it; its client goes to the end. None once the queue is closed and empty."""
        with self._changed:
            while not self._clients:
                if self._is_closed:
                    return None
                self._changed.wait()
            client, requests = self._clients.popitem(last=False)
            request = requests.popleft()
            if requests:
                self._clients[client] = requests
            return request

    def close(self) -> None:
        """Take no more requests, and cancel the waiting ones."""
        with self._changed:
            self._is_closed = True
            for requests in self._clients.values():
                for request in requests:
                    request.is_cancelled.set()
            self._changed.notify_all()
