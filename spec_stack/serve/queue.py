"""The request queue, round-robin over clients."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.serve.protocol import BadRequestError
from spec_stack.types import StepOutput


class RequestCancelled(BaseException):
    """The client disconnected. A BaseException, so that no fallback handles it."""


class QueueFullError(Exception):
    """The queue is full, for this client or in total."""


@dataclass(frozen=True)
class OutputChunk:
    """A step of one choice."""

    index: int
    output: StepOutput


StreamItem = OutputChunk | BadRequestError | None
"""None after the last."""


@dataclass(eq=False)
class QueuedWork:
    """Work that waits in a queue."""

    client: str
    is_cancelled: threading.Event = field(default_factory=threading.Event, kw_only=True)
    queued_at: float = field(default_factory=monotonic, kw_only=True)

    def check_cancelled(self) -> None:
        """Raise RequestCancelled if the client has disconnected."""
        if self.is_cancelled.is_set():
            raise RequestCancelled


@dataclass(eq=False)
class QueuedRequest(QueuedWork):
    """A queued request. `deliver` is called in the generating thread."""

    prompt: EncodedPrompt
    options: Mapping[str, Any]
    num_choices: int
    deliver: Callable[[StreamItem], None]


Work = TypeVar("Work", bound=QueuedWork)


class RequestQueue(Generic[Work]):
    """Requests by client, served round-robin; each client's requests stay in order."""

    def __init__(self, max_queued: int, max_per_client: int) -> None:
        self._max_queued, self._max_per_client = max_queued, max_per_client
        self._clients: OrderedDict[str, deque[Work]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._clients.values()))

    def add(self, request: Work) -> None:
        """Append a request to its client's queue. Raises QueueFullError."""
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

    def cancel(self, request: Work) -> None:
        """Cancel a waiting or running request."""
        request.is_cancelled.set()
        with self._changed:
            requests = self._clients.get(request.client)
            if requests is not None and request in requests:
                requests.remove(request)
                if not requests:
                    del self._clients[request.client]

    def next(self) -> Work | None:
        """Wait for and remove a request; its client moves to the end. None once closed and empty."""
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
        """Reject new requests, and cancel waiting ones."""
        with self._changed:
            self._is_closed = True
            for requests in self._clients.values():
                for request in requests:
                    request.is_cancelled.set()
            self._changed.notify_all()
