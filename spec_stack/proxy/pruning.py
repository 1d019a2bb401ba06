"""Prunes prompts in one thread: a fair queue, a deadline, and conversations that keep their decisions."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import Counter, Histogram

from spec_stack.api.pruner import Pruner, PrunerConversation, PruneResult
from spec_stack.config import SessionConfig
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.fair_executor import CheckCancelled, FairExecutor, QueueFullError, RequestCancelled
from spec_stack.serve.http import AppMetrics

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

    @property
    def counts(self) -> dict[str, int]:
        """The draft's tokens by part; none of a prompt that was not scored."""
        if (result := self.result) is None:
            return {}
        return {"all": result.num_tokens, "kept": result.num_kept_tokens, "recalled": result.num_recalled_tokens}


class ProxyMetrics(AppMetrics):
    """The proxy's metrics."""

    def __init__(self) -> None:
        super().__init__("ok: upstream answered, cancelled, refused, failed")
        forwarded = "pruned; or the whole: dense, short, long, busy, late, failed, unread"
        self._prompts = Counter("prompts", f"Prompts by what was forwarded ({forwarded})", ["outcome"], **self.of_app)
        parts = "Prompt tokens of the draft (all, kept, recalled)"
        self._tokens = Counter("prompt_tokens", parts, ["part"], **self.of_app)
        self.scoring_s = Histogram("scoring_seconds", "Scoring and pruning of a prompt", **self.of_app)

    def add(self, pruning: Pruning) -> None:
        """Count one prompt."""
        self._prompts.labels(pruning.outcome).inc()
        for part, count in pruning.counts.items():
            self._tokens.labels(part).inc(count)


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

    def prune(self, prompt: Any, marker: str) -> PruneResult:
        """Prune the next turn."""
        self.result = self.pruner.prune(prompt, keep_rate=self.keep_rate, marker=marker)
        self.prompt = prompt
        return self.result

    def precedes(self, client: str, keep_rate: float | None, prompt: Any) -> bool:
        """Whether a prompt is this conversation's last one, or that and its answer with more behind.

        Other longer prompts, such as a document that gets a question, are pruned anew: their decisions must not depend
        on an earlier request.
        """
        if (self.client, self.keep_rate, type(self.prompt)) != (client, keep_rate, type(prompt)):
            return False
        rest = prompt[len(self.prompt) :]
        goes_on = not rest or (not isinstance(rest, str) and rest[0]["role"] == "assistant")
        return goes_on and bool(prompt[: len(self.prompt)] == self.prompt)


class PromptPruner:
    """Prunes the prompts of all clients, round-robin, in a thread of its own.

    A prompt is pruned as the turns of a conversation are: each answer in it ends a turn. Hence what is kept of a
    conversation's beginning depends on its messages alone, and later turns begin with the same tokens.
    """

    def __init__(self, pruner: Pruner, config: ProxyConfig) -> None:
        self._pruner, self._config, self.metrics = pruner, config, ProxyMetrics()
        self.queue = FairExecutor(
            "spec-stack-prune", config.max_queued, config.max_queued_per_client, self.metrics.wait_s.observe
        )
        self._conversations: list[_Conversation] = []
        self.metrics.gauge("prompts_waiting", "Prompts waiting to be scored", self.queue.__len__)
        self.metrics.gauge("sessions", "Conversations kept", self._conversations.__len__)
        # A tokenizer serves one thread.
        self._tokenizer, self._counter = deepcopy(pruner.tokenizer), ThreadPoolExecutor(1, "spec-stack-count")

    async def stop(self) -> None:
        """Stop scoring. A running prompt ends with the process."""
        await self.queue.close()
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
        try:
            job = self.queue.submit(client, partial(self._score, client, prompt, keep_rate))
            result = await asyncio.wait_for(job, self._config.deadline_s)
        except QueueFullError as error:
            return Pruning("busy", f"off: the draft is busy: {error.message}")
        except TimeoutError:
            logger.warning("a prompt was forwarded whole: scoring took over deadline_s=%s", self._config.deadline_s)
            return Pruning("late", f"off: scoring takes longer than deadline_s={self._config.deadline_s}")
        except Exception as error:
            logger.warning("a prompt was forwarded whole: %s", repr(error)[:_MAX_LOGGED])
            return Pruning("failed", f"off: the draft cannot score the prompt ({type(error).__name__})")
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

    def _score(self, client: str, prompt: Any, keep_rate: float | None, check_cancelled: CheckCancelled) -> PruneResult:
        conversation = self._take(client, keep_rate, prompt) or self._open(client, keep_rate, prompt)
        try:
            with self.metrics.scoring_s.time():
                result = self._advance(conversation, prompt, check_cancelled)
        except RequestCancelled:
            self._keep(conversation)
            raise
        except Exception:
            # Out of memory: the caches of the other conversations may be what it lacks.
            self._conversations.clear()
            raise
        self._keep(conversation)
        return result

    def _advance(self, conversation: _Conversation, prompt: Any, check_cancelled: CheckCancelled) -> PruneResult:
        """Prune the turns after a conversation's last prompt, if any."""
        for stop in _turns(prompt, len(conversation.prompt)):
            check_cancelled()
            # A turn may hold no text.
            with suppress(ValueError):
                conversation.prune(prompt[:stop], self._config.marker)
        if conversation.result is not None and conversation.prompt == prompt:
            # A client that tries again.
            return conversation.result
        return conversation.prune(prompt, self._config.marker)

    def _open(self, client: str, keep_rate: float | None, prompt: Any) -> _Conversation:
        pruner = self._pruner.conversation(SessionConfig(recall=self._config.recall))
        return _Conversation(client, keep_rate, pruner, prompt[:0])

    def _take(self, client: str, keep_rate: float | None, prompt: Any) -> _Conversation | None:
        """Remove and return the client's conversation that a prompt continues, the longest one."""
        fitting = [each for each in self._conversations if each.precedes(client, keep_rate, prompt)]
        longest = max(fitting, key=lambda each: len(each.prompt), default=None)
        if longest is not None:
            self._conversations.remove(longest)
        return longest

    def _keep(self, conversation: _Conversation) -> None:
        kept, config = self._conversations, self._config
        kept.append(conversation)
        while len(kept) > config.max_conversations or sum(each.num_tokens for each in kept) > config.max_cached_tokens:
            kept.pop(0)


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
