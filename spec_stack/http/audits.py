"""Audits: pruned requests answered again, from the whole and from the pruned prompt, while no client waits.

Both answers are greedy and short, and are compared by their words. Clients get neither. A request that arrives ends a
running audit, which is tried again later.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter as Counts
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from prometheus_client import Counter, Gauge

from spec_stack.binomial import lower_bound, upper_bound
from spec_stack.http.config import HttpConfig

logger = logging.getLogger(__name__)

ROUTE_HEADER = "x-spec-stack-route"
"""Names the route that a request is counted under; by default it is the path."""
MAX_TOKENS = 64
"""Of an audit's answers."""
AUDITOR = "audits"
"""The client that audits wait for in the queue."""
_MOST_TRIES = 3
_MOST_ROUTES, _MAX_NAME = 32, 64
# Audits that decide on a route: the latest so many, and no fewer than so many to turn pruning off.
_WINDOW, _LEAST = 20, 5
_AGREEMENT = 0.5
_WORD = re.compile(r"\w+")

Words = Counts[str]


@dataclass(eq=False)
class Audit:
    """A request to answer again. answer: gives the words of the answers to the whole and to the pruned prompt, None
    where nothing is pruned; its errors count as failed audits."""

    route: str
    answer: Callable[[], Awaitable[tuple[Words, Words] | None]]
    num_tries: int = 0


@dataclass
class _Route:
    """The latest audits of a route, true where the answer was lost, and the numbers of all."""

    latest: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_lost: int = 0
    num_audits: int = 0
    is_off: bool = False


class Audits:
    """Audits one request at a time while nobody waits. of_app: the arguments that every metric takes."""

    def __init__(self, config: HttpConfig, of_app: Mapping[str, Any]) -> None:
        self._config = config
        self._routes: dict[str, _Route] = {}
        self._waiting: deque[Audit] = deque()
        self._num_live = 0
        self._may_run = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        outcomes = "agreed, lost, failed, interrupted, dropped"
        self._audits = Counter("audits", f"Audits by route and outcome ({outcomes})", ["route", "outcome"], **of_app)
        self._loss = Gauge("audit_loss", "Lost answers, share of audits, 95 %", ["route", "end"], **of_app)
        self._off = Gauge("audit_off", "Whether a route's prompts are forwarded whole", ["route"], **of_app)

    def route_of(self, request: Request) -> str:
        """The route that a request is counted under."""
        named = request.headers.get(ROUTE_HEADER, "") or request.url.path
        return self._counted_as("".join(filter(str.isprintable, named))[:_MAX_NAME])

    def _counted_as(self, name: str) -> str:
        """The name of a route, as long as there are few: each makes metrics of its own."""
        return name if name in self._routes or len(self._routes) < _MOST_ROUTES else "other"

    def why_whole(self, route: str) -> str:
        """Why prompts of a route are forwarded whole; empty where they are pruned."""
        known = self._routes.get(route)
        if known is None or not known.is_off:
            return ""
        most = self._config.audit_max_loss
        return f"off: audits of {route} found more lost answers than audit_max_loss={most}; a keep rate prunes anyway"

    def offer(self, audit: Audit) -> None:
        """Audit a request later, by chance as often as audit_rate says; the oldest one gives way."""
        if random.random() >= self._config.audit_rate:
            return
        # Others may have come since the request did.
        audit.route = self._counted_as(audit.route)
        self._routes.setdefault(audit.route, _Route())
        self._waiting.append(audit)
        if len(self._waiting) > self._config.max_audits:
            self._audits.labels(self._waiting.popleft().route, "dropped").inc()
        self._look()

    @contextmanager
    def client_waits(self) -> Iterator[None]:
        """In this block a client waits: a running audit ends, and none begins."""
        self._num_live += 1
        self._look()
        if self._running is not None:
            self._running.cancel()
        try:
            yield
        finally:
            self._num_live -= 1
            self._look()

    def _look(self) -> None:
        if self._waiting and not self._num_live:
            self._may_run.set()
        else:
            self._may_run.clear()

    async def run(self) -> None:
        """Audit what waits, until cancelled."""
        while True:
            await self._may_run.wait()
            await asyncio.sleep(self._config.audit_idle_s)
            if not self._may_run.is_set():
                continue
            audit = self._waiting.popleft()
            self._look()
            self._running = asyncio.create_task(self._compare(audit))
            try:
                await asyncio.wait([self._running])
                if self._running.cancelled():
                    self._try_again(audit)
            finally:
                self._running.cancel()
                self._running = None

    def _try_again(self, audit: Audit) -> None:
        audit.num_tries += 1
        if audit.num_tries < _MOST_TRIES:
            self._waiting.appendleft(audit)
            self._look()
        else:
            self._audits.labels(audit.route, "interrupted").inc()

    async def _compare(self, audit: Audit) -> None:
        """Answer twice, and count what was found."""
        try:
            found = await audit.answer()
        except Exception as error:
            logger.info("an audit failed on %s: %s", audit.route, type(error).__name__)
            self._audits.labels(audit.route, "failed").inc()
            return
        if found is None:
            return
        whole, part = found
        if lost := is_lost(whole, part):
            logger.warning(
                "an audited answer was lost on %s: %d of its %d words are in the answer to the pruned prompt",
                *(audit.route, (whole & part).total(), whole.total()),
            )
        self._audits.labels(audit.route, "lost" if lost else "agreed").inc()
        self._note(audit.route, lost)

    def _note(self, name: str, lost: bool) -> None:
        """Count an audit, and turn the route's pruning off or on."""
        route = self._routes[name]
        route.latest.append(lost)
        route.num_lost, route.num_audits = route.num_lost + lost, route.num_audits + 1
        self._loss.labels(name, "low").set(lower_bound(route.num_lost, route.num_audits, 0.975))
        self._loss.labels(name, "share").set(route.num_lost / route.num_audits)
        self._loss.labels(name, "high").set(upper_bound(route.num_lost, route.num_audits, 0.975))
        most, num_lost, n = self._config.audit_max_loss, sum(route.latest), len(route.latest)
        if most is not None and n >= (_WINDOW if route.is_off else _LEAST):
            is_over = lower_bound(num_lost, n) > most
            if is_over != route.is_off:
                route.is_off = is_over
                what = "off: whole prompts are forwarded" if is_over else "on again"
                logger.warning(
                    "pruning on %s is %s; %d of %d audited answers were lost, audit_max_loss=%s",
                    *(name, what, num_lost, n, most),
                )
                # What is found from here on decides alone.
                route.latest.clear()
        self._off.labels(name).set(route.is_off)


def words_in(texts: Iterable[str]) -> Words:
    """The words of some texts, in small letters."""
    return Counts(word.lower() for text in texts for word in _WORD.findall(text))


def is_lost(whole: Words, part: Words) -> bool:
    """Whether an answer to the pruned prompt is another one: it lacks a word with a digit, or shares too few words with
    the answer to the whole prompt (F1)."""
    both = whole.total() + part.total()
    if any(word not in part for word in whole if any(map(str.isdigit, word))):
        return True
    return both > 0 and 2 * (whole & part).total() / both < _AGREEMENT
