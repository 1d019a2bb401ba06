"""Answers queued requests in one thread, each in a session of its client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram

from spec_stack.api.answering import samples
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.http.app import AppMetrics
from spec_stack.http.audits import AUDITOR, MAX_TOKENS, Words, words_in
from spec_stack.http.errors import FAILED, BadRequestError
from spec_stack.http.fair_executor import CheckCancelled, FairExecutor
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.responses import Json, ResponseBuilder
from spec_stack.types import Metrics

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session

logger = logging.getLogger(__name__)
Answer = Json | BadRequestError

# Counter, meaning, and the field of an answer's metrics.
_COUNTED = (
    ("generated_tokens", "Tokens generated", "num_tokens"),
    ("steps", "Forwards of the target", "num_steps"),
    ("drafted_tokens", "Tokens drafted", "num_proposed"),
    ("accepted_tokens", "Drafted tokens accepted", "num_accepted"),
)
_PROMPT_PARTS = {
    "all": "num_prompt_tokens",
    "cached": "num_cached_tokens",
    "kept": "num_kept_tokens",
    "recalled": "num_recalled_tokens",
}


class ServerMetrics(AppMetrics):
    """The server's metrics."""

    def __init__(self) -> None:
        super().__init__("ok, cancelled, refused, failed")
        self._ttft_s = Histogram("ttft_seconds", "From the first work to the first token", **self.of_app)
        parts = f"Prompt tokens ({', '.join(_PROMPT_PARTS)})"
        self._prompt_tokens = Counter("prompt_tokens", parts, ["part"], **self.of_app)
        self._counters = {field: Counter(name, meaning, **self.of_app) for name, meaning, field in _COUNTED}

    def add(self, metrics: Metrics) -> None:
        """Count one answer."""
        self._ttft_s.observe(metrics.ttft_s)
        for part, field in _PROMPT_PARTS.items():
            self._prompt_tokens.labels(part).inc(getattr(metrics, field))
        for field, counter in self._counters.items():
            counter.inc(getattr(metrics, field))


class SessionStore:
    """Least-recently-used sessions; single-threaded."""

    def __init__(self, generator: SpecStackGenerator, max_sessions: int) -> None:
        self.generator, self._max = generator, max_sessions
        # In order of last use.
        self._kept: list[tuple[str, Session]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def lend(self, client: str, prompt: EncodedPrompt) -> Iterator[Session]:
        """The client's session with the longest common prefix, or a new one; dropped on failure. Other clients'
        sessions are never used: latency and recalled tokens would leak their texts."""
        lengths = [session.num_continued(encoded=prompt) if owner == client else 0 for owner, session in self._kept]
        longest = max(lengths, default=0)
        session = self._kept.pop(lengths.index(longest))[1] if longest else self.generator.session()
        self._kept.append((client, session))
        try:
            yield session
        # Not after a disconnect, where the conversation can continue.
        except Exception:
            self._kept.pop()[1].close()
            raise
        finally:
            while len(self._kept) > self._max:
                self._kept.pop(0)[1].close()

    def close(self) -> None:
        for _, session in self._kept:
            session.close()
        self._kept = []


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
        self.sessions = SessionStore(generator, config.max_sessions)
        self.metrics = ServerMetrics()
        self.queue = FairExecutor(
            "spec-stack-serve", config.max_queued, config.max_queued_per_client, self.metrics.wait_s.observe
        )
        self.metrics.gauge("requests_running", "Requests being answered", lambda: int(self.queue.is_busy))
        self.metrics.gauge("requests_waiting", "Requests in the queue", self.queue.__len__)
        self.metrics.gauge("sessions", "Conversations kept", self.sessions.__len__)

    def submit(self, client: str, request: QueuedRequest) -> asyncio.Task[Answer]:
        """Queue a request. The result is the whole response, or the error. Raises QueueFullError."""
        job = self.queue.submit(client, partial(self._run, client, request))
        job.add_done_callback(self._count)
        return job

    async def answer_again(self, prompt: EncodedPrompt, options: Mapping[str, Any]) -> tuple[Words, Words] | None:
        """The words of short greedy answers to the whole and to the pruned prompt, each in a new conversation, for an
        audit; None where nothing is pruned."""
        most = min(options["max_tokens"], MAX_TOKENS)
        greedy = {**options, "max_tokens": most, "temperature": 0.0, "seed": None, "logprobs": None}
        return await self.queue.submit(AUDITOR, partial(self._answer_again, prompt, greedy))

    def _answer_again(
        self, prompt: EncodedPrompt, options: Mapping[str, Any], check_cancelled: CheckCancelled
    ) -> tuple[Words, Words] | None:
        answers = []
        for name in (options.get("sparse_prefill"), "off"):
            text, given = "", {**options, "sparse_prefill": name, "on_progress": lambda *_: check_cancelled()}
            with closing(self.sessions.generator.stream_encoded(prompt, given)) as outputs:
                for output in outputs:
                    check_cancelled()
                    text += output.text
            if name != "off" and output.metrics is not None and not output.metrics.sparse_prefill:
                return None
            answers.append(words_in([text]))
        return answers[1], answers[0]

    async def stop(self) -> None:
        """Cancel all requests; returns when the running one has ended, or after a second."""
        # A step may take longer; its session is freed with the process.
        if await self.queue.close():
            self.sessions.close()

    def _run(self, client: str, request: QueuedRequest, check_cancelled: CheckCancelled) -> Answer:
        try:
            with self.sessions.lend(client, request.prompt) as session:
                self._generate(request, session, check_cancelled)
            return request.builder.whole()
        except ValueError as error:
            return BadRequestError(str(error))
        except Exception:
            logger.exception("a request failed")
            return BadRequestError(FAILED, status=500)

    def _count(self, job: asyncio.Task[Answer]) -> None:
        """Count a request by how it ended, also one that was cancelled in the queue."""
        if job.cancelled():
            outcome = "cancelled"
        elif isinstance(answer := job.result(), BadRequestError):
            outcome = "failed" if answer.status == 500 else "refused"
        else:
            outcome = "ok"
        self.metrics.requests.labels(outcome).inc()

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
