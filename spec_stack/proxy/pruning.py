"""Prunes prompts in one thread: a fair queue, a deadline, and conversations that keep their decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from spec_stack.api.pruner import Pruner, PrunerConversation, PruneResult
from spec_stack.config import SessionConfig
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.http import AppMetrics
from spec_stack.serve.queue import QueuedWork, QueueFullError, RequestCancelled, RequestQueue

logger = logging.getLogger(__name__)

# Bytes per position above which a prompt is too long for the draft, and bytes per token of long words.
_BYTES_PER_POSITION, _BYTES_PER_TOKEN = 16, 8
_MAX_LOGGED = 300


@dataclass(frozen=True)
class Pruning:
    """What is forwarded, and why. outcome: the label in `ProxyMetrics`. prompt: the shorter prompt; None forwards the
    given one."""

    outcome: str
    reason: str
    prompt: Any = None
    result: PruneResult | None = None


class ProxyMetrics(AppMetrics):
    """The proxy's metrics; both functions are called on each scrape."""

    def __init__(self, num_waiting: Callable[[], int], num_conversations: Callable[[], int]) -> None:
        super().__init__("ok: upstream answered, cancelled, refused, failed")
        forwarded = "pruned; or the whole: dense, short, long, busy, late, failed, unread"
        self._prompts = self.counter("prompts", f"Prompts by what was forwarded ({forwarded})", ["outcome"])
        self._tokens = self.counter("prompt_tokens", "Prompt tokens of the draft (all, kept, recalled)", ["part"])
        self.scoring_s = self.histogram("scoring_seconds", "Scoring and pruning of a prompt")
        self.gauge("prompts_waiting", "Prompts waiting to be scored", num_waiting)
        self.gauge("sessions", "Conversations kept", num_conversations)

    def add(self, pruning: Pruning) -> None:
        """Count one prompt."""
        self._prompts.labels(pruning.outcome).inc()
        if (result := pruning.result) is not None:
            self._tokens.labels("all").inc(result.num_tokens)
            self._tokens.labels("kept").inc(result.num_kept_tokens)
            self._tokens.labels("recalled").inc(result.num_recalled_tokens)


@dataclass(eq=False)
class _Job(QueuedWork):
    prompt: Any
    keep_rate: float | None
    result: Future[PruneResult] = field(default_factory=Future)


@dataclass(eq=False)
class _Conversation:
    """A conversation, and its last prompt and result."""

    client: str
    keep_rate: float | None
    pruner: PrunerConversation
    prompt: Any
    result: PruneResult | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the draft's cache."""
        return self.result.num_tokens if self.result else 0

    def precedes(self, job: _Job) -> bool:
        """Whether a prompt is this conversation's last one, or that and its answer with more behind.

        Other longer prompts, such as a document that gets a question, are pruned anew: their decisions must not depend
        on an earlier request.
        """
        is_same = (self.client, self.keep_rate, type(self.prompt)) == (job.client, job.keep_rate, type(job.prompt))
        rest = job.prompt[len(self.prompt) :]
        goes_on = not rest or (not isinstance(rest, str) and rest[0]["role"] == "assistant")
        return is_same and goes_on and job.prompt[: len(self.prompt)] == self.prompt


class PromptPruner:
    """Prunes the prompts of all clients, round-robin, in a thread of its own.

    A prompt is pruned as the turns of a conversation are: each answer in it ends a turn. Hence what is kept of a
    conversation's beginning depends on its messages alone, and later turns begin with the same tokens.
    """

    def __init__(self, pruner: Pruner, config: ProxyConfig) -> None:
        self._pruner, self._config = pruner, config
        self.queue: RequestQueue[_Job] = RequestQueue(config.max_queued, config.max_queued_per_client)
        self._conversations: list[_Conversation] = []
        self.metrics = ProxyMetrics(self.queue.__len__, self._conversations.__len__)
        # A tokenizer serves one thread.
        self._tokenizer = deepcopy(pruner.tokenizer)
        self._counter = ThreadPoolExecutor(1, "spec-stack-count")
        self._thread = threading.Thread(target=self._work, name="spec-stack-prune", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop scoring. A running prompt ends with the process."""
        self.queue.close()
        self._counter.shutdown(wait=False, cancel_futures=True)

    async def prune(self, client: str, prompt: Any, keep_rate: float | None = None) -> Pruning:
        """Prune a text or messages; keep_rate prunes prompts of any length. Never raises for a prompt."""
        shown = _shown(prompt)
        num_bytes = len(shown.encode("utf-8", "surrogatepass"))
        if num_bytes > _BYTES_PER_POSITION * self._pruner.max_positions:
            return Pruning(
                "long", f"off: the prompt is too long for the draft's {self._pruner.max_positions} positions"
            )
        least = self._pruner.config.min_prompt_tokens
        if keep_rate is None and await self._is_shorter(shown, num_bytes, least):
            return Pruning("short", f"off: the prompt is shorter than min_prompt_tokens={least}")
        job = _Job(client, prompt, keep_rate)
        try:
            self.queue.add(job)
            result = await asyncio.wait_for(asyncio.wrap_future(job.result), self._config.deadline_s)
        except QueueFullError as error:
            return Pruning("busy", f"off: the draft is busy: {error}")
        except TimeoutError:
            logger.warning("a prompt was forwarded whole: scoring took over deadline_s=%s", self._config.deadline_s)
            return Pruning("late", f"off: scoring takes longer than deadline_s={self._config.deadline_s}")
        except Exception as error:
            logger.warning("a prompt was forwarded whole: %s", repr(error)[:_MAX_LOGGED])
            return Pruning("failed", f"off: the draft cannot score the prompt ({type(error).__name__})")
        finally:
            self.queue.cancel(job)
        if result.num_kept_tokens >= result.num_tokens:
            return Pruning("dense", result.reason, None, result)
        return Pruning("pruned", result.reason, result.messages, result)

    async def _is_shorter(self, shown: str, num_bytes: int, least: int) -> bool:
        """Whether a prompt surely has fewer tokens, without a place in the queue."""
        if num_bytes < least or num_bytes > _BYTES_PER_TOKEN * least:
            return num_bytes < least
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._counter, lambda: len(self._tokenizer(shown).input_ids)) < least
        except Exception:
            # The draft's thread finds and reports the problem.
            return False

    def _work(self) -> None:
        while (job := self.queue.next()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            began = monotonic()
            self.metrics.wait_s.observe(began - job.queued_at)
            try:
                job.result.set_result(self._score(job))
            except RequestCancelled:
                job.result.set_exception(QueueFullError("the prompt is no longer waited for"))
            except Exception as error:
                # Out of memory: the caches of the other conversations may be what it lacks.
                self._conversations.clear()
                job.result.set_exception(error)
            self.metrics.scoring_s.observe(monotonic() - began)

    def _score(self, job: _Job) -> PruneResult:
        job.check_cancelled()
        conversation = self._take(job) or self._open(job)
        if conversation.prompt == job.prompt and conversation.result is not None:
            # A client that tries again.
            self._keep(conversation)
            return conversation.result
        for stop in _turns(job.prompt, len(conversation.prompt)):
            if job.is_cancelled.is_set():
                self._keep(conversation)
                raise RequestCancelled
            # A turn may hold no text.
            with suppress(ValueError):
                self._advance(conversation, job.prompt[:stop])
        result = self._advance(conversation, job.prompt)
        self._keep(conversation)
        return result

    def _open(self, job: _Job) -> _Conversation:
        pruner = self._pruner.conversation(SessionConfig(recall=self._config.recall))
        return _Conversation(job.client, job.keep_rate, pruner, job.prompt[:0])

    def _advance(self, conversation: _Conversation, prompt: Any) -> PruneResult:
        keep_rate, marker = conversation.keep_rate, self._config.marker
        conversation.result = conversation.pruner.prune(prompt, keep_rate=keep_rate, marker=marker)
        conversation.prompt = prompt
        return conversation.result

    def _take(self, job: _Job) -> _Conversation | None:
        """Remove and return the client's conversation that a prompt continues, the longest one."""
        fitting = [each for each in self._conversations if each.precedes(job)]
        longest = max(fitting, key=lambda each: len(each.prompt), default=None)
        if longest is not None:
            self._conversations.remove(longest)
        return longest

    def _keep(self, conversation: _Conversation) -> None:
        self._conversations.append(conversation)
        while self._conversations and (
            len(self._conversations) > self._config.max_conversations
            or sum(each.num_tokens for each in self._conversations) > self._config.max_cached_tokens
        ):
            self._conversations.pop(0)


def _turns(prompt: Any, start: int) -> list[int]:
    """The ends of earlier turns after message `start`: each answer follows one."""
    if isinstance(prompt, str):
        return []
    is_answer = [message["role"] == "assistant" for message in prompt]
    return [at for at in range(start + 1, len(prompt)) if is_answer[at] and not is_answer[at - 1]]


def _shown(prompt: Any) -> str:
    """What the draft reads of a prompt, and more: its JSON without parts other than text."""
    shown = prompt if isinstance(prompt, str) else [_without_media(message) for message in prompt]
    return json.dumps(shown, ensure_ascii=False)


def _without_media(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if isinstance(part, Mapping) and "text" in part]}
