"""Prunes prompts in one thread: a fair queue, a deadline, and conversations that keep their decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from asyncio import Task
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Annotated, Any

from prometheus_client import Counter, Histogram
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from spec_stack.api.pruner import Prunable, Pruner, PrunerConversation, PruneResult
from spec_stack.config import SessionConfig
from spec_stack.http.app import AppMetrics
from spec_stack.http.errors import (
    MAX_NAME_CHARS,
    MAX_QUESTION_CHARS,
    BadRequestError,
    first_problem,
    is_like,
    unknown_field,
)
from spec_stack.http.fair_executor import CheckCancelled, ClientDisconnected, FairExecutor, QueueFullError
from spec_stack.proxy.config import ProxyConfig
from spec_stack.settings.checks import require

logger = logging.getLogger(__name__)

# Bytes per position above which a prompt is too long for the draft, and bytes per token of long words.
_BYTES_PER_POSITION, _BYTES_PER_TOKEN = 16, 8
# More tokens than a template writes around a message, and than any prompt has.
_TEMPLATE_TOKENS, _ALL_TOKENS = 64, 1 << 30
_MAX_PROTECTED = 64
OPTIONS_FIELD = "spec_stack"
"""The body's field with `PruneOptions`, which upstream does not get."""
# Fields about pruning that other entry points have, and what says the same here.
_MISPLACED = {
    **{name: f'spec_stack: {{"{name}": …}}' for name in ("keep_rate", "max_dropped_attention", "question", "protect")},
    "sparse_prefill": 'spec_stack: {"keep_rate": 1}, which forwards the whole prompt',
}

Check = Callable[..., None]
"""Raises ClientDisconnected when work should end; called as `on_progress`."""


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
        forwarded = "pruned; or the whole: dense, short, long, busy, late, failed, unread, audited"
        self._prompts = Counter("prompts", f"Prompts by what was forwarded ({forwarded})", ["outcome"], **self.of_app)
        parts = "Prompt tokens of the draft (all, kept, recalled)"
        self._tokens = Counter("prompt_tokens", parts, ["part"], **self.of_app)
        self.scoring_s = Histogram("scoring_seconds", "Scoring and pruning of a prompt", **self.of_app)

    def add(self, pruning: Pruning) -> None:
        """Count one prompt."""
        self._prompts.labels(pruning.outcome).inc()
        for part, count in pruning.counts.items():
            self._tokens.labels(part).inc(count)


def _not_blank(text: str) -> str:
    require(bool(text.strip()), "it is empty; give its text, or leave it out")
    return text


class PruneOptions(BaseModel):
    """What a request asks of pruning, in the body's field `spec_stack` (see `Pruner.prune`)."""

    model_config = ConfigDict(strict=True, frozen=True)

    keep_rate: float | None = Field(None, gt=0, le=1)
    max_dropped_attention: float | None = Field(None, ge=0, le=1)
    question: Annotated[str, Field(max_length=MAX_QUESTION_CHARS), AfterValidator(_not_blank)] | None = None
    # Few and short ones: each is searched for in every line.
    protect: Annotated[
        list[Annotated[str, Field(max_length=MAX_QUESTION_CHARS)]], Field(max_length=_MAX_PROTECTED)
    ] = []


def refuse_misplaced(body: Mapping[str, Any]) -> None:
    """Raise BadRequestError for an option of pruning that stands outside of the body's field, where nothing reads it;
    other unknown fields are upstream's."""
    extra = body.get("extra_body")
    if isinstance(extra, dict) and not extra.keys().isdisjoint((OPTIONS_FIELD, *_MISPLACED)):
        raise BadRequestError("extra_body is an argument of OpenAI's client, which makes fields of its entries")
    for name in (each for each in body if body[each] is not None and each != OPTIONS_FIELD):
        if instead := _MISPLACED.get(name[:MAX_NAME_CHARS].lower().replace("-", "_")):
            raise BadRequestError(f"{name} is no field of the body itself; the proxy takes {instead}", name)
        if is_like(name, [OPTIONS_FIELD]):
            raise unknown_field(name, [OPTIONS_FIELD])


def body_options(given: Any, default: PruneOptions) -> PruneOptions:
    """The options of a body's field, and defaults of those that it lacks; a null is as if it was not there. Raises
    BadRequestError."""
    known, given = [*PruneOptions.model_fields], {} if given is None else given
    if not isinstance(given, dict):
        raise BadRequestError(f"spec_stack must be an object of {', '.join(known)}", "spec_stack")
    for name in given:
        if name not in known:
            raise unknown_field(name, known)
    try:
        own = {name: value for name, value in given.items() if value is not None}
        return PruneOptions.model_validate(default.model_dump() | own)
    except ValidationError as error:
        raise first_problem(error, "spec_stack") from error


@dataclass(eq=False)
class _Conversation:
    """A conversation. prompt: the last one that was pruned, with its result; latest: the one that was last asked for,
    of which the draft has read a part."""

    client: str
    options: PruneOptions
    pruner: PrunerConversation
    prompt: Prunable
    latest: Prunable
    result: PruneResult | None = None

    def prune(self, prompt: Prunable, marker: str | None, check: Check, max_tokens: int | None = None) -> PruneResult:
        """Prune the next turn. max_tokens: instead of the keep rate."""
        options = self.options.model_dump()
        if max_tokens is not None:
            options |= {"keep_rate": None, "max_tokens": max_tokens}
        if prompt != self.latest:
            options["question"] = None
        self.prompt, self.result = prompt, self.pruner.prune(prompt, **options, marker=marker, on_progress=check)
        return self.result

    @property
    def is_whole(self) -> bool:
        """Whether nothing was dropped so far."""
        return self.result is None or self.result.num_kept_tokens == self.result.num_tokens

    def num_shared(self, client: str, options: PruneOptions, prompt: Prunable) -> int:
        """How many messages of a prompt this conversation goes on from; 0 for another conversation.

        It goes on where the prompt is the last one, or that and its answer with more behind. Other longer prompts, such
        as a document that gets a question, are pruned anew: their decisions must not depend on an earlier request.
        """
        asks_the_same = self.options == options
        same = self.options.model_copy(update={"question": options.question})
        if self.client != client or same != options:
            return 0
        if isinstance(prompt, str) or isinstance(self.latest, str):
            return int(asks_the_same and self.latest == prompt)
        rest = prompt[len(self.prompt) :]
        goes_on = rest[0]["role"] == "assistant" or not self.prompt if rest else asks_the_same
        if not goes_on or prompt[: len(self.prompt)] != self.prompt:
            return 0
        pairs = zip(prompt, self.latest, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(prompt), len(self.latest)))


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

    async def prune(self, client: str, prompt: Prunable, options: PruneOptions) -> Pruning:
        """Prune a text or messages; a keep rate prunes prompts of any length. Never raises for a prompt."""
        if options.keep_rate == 1:
            return Pruning("dense", "off: keep_rate is 1")
        shown, most = _as_bytes(prompt), self._pruner.max_positions
        if len(shown) > _BYTES_PER_POSITION * most:
            return Pruning("long", f"off: the prompt is too long for the draft's {most} positions")
        least = self._pruner.config.min_prompt_tokens
        if options.keep_rate is None and await self._is_shorter(shown, least):
            return Pruning("short", f"off: the prompt is shorter than min_prompt_tokens={least}")
        is_late = Event()
        try:
            job = self.queue.submit(client, partial(self._score, client, prompt, options, is_late))
            result = await self._in_time(job, is_late)
        except QueueFullError as error:
            return Pruning("busy", f"off: the draft is busy: {error.message}")
        except TimeoutError:
            logger.warning("a prompt was forwarded whole: scoring took over deadline_s=%s", self._config.deadline_s)
            return Pruning("late", f"off: scoring takes longer than deadline_s={self._config.deadline_s}")
        except Exception as error:
            return Pruning("failed", f"off: the draft cannot score the prompt ({type(error).__name__})")
        if result.num_kept_tokens >= result.num_tokens:
            return Pruning("dense", result.reason, None, result)
        return Pruning("pruned", result.reason, result.messages, result)

    async def _in_time(self, job: Task[PruneResult], is_late: Event) -> PruneResult:
        """A job's result. Raises TimeoutError after the deadline: the job then goes on, for the conversation's next
        turn, until another one waits for the draft."""
        try:
            done, _ = await asyncio.wait([job], timeout=self._config.deadline_s)
        except asyncio.CancelledError:
            job.cancel()
            raise
        if done:
            return job.result()
        is_late.set()
        if self.queue.is_waiting(job):
            job.cancel()
        # Nobody else asks how it ended.
        job.add_done_callback(lambda job: job.cancelled() or job.exception())
        raise TimeoutError

    async def _is_shorter(self, shown: bytes, least: int) -> bool:
        """Whether a prompt surely has fewer tokens, without a place in the queue."""
        if len(shown) < least or len(shown) > _BYTES_PER_TOKEN * least:
            return len(shown) < least
        try:
            loop, text = asyncio.get_running_loop(), shown.decode()
            return await loop.run_in_executor(self._counter, lambda: len(self._tokenizer(text).input_ids)) < least
        except Exception:
            # The draft's thread finds and reports the problem.
            return False

    def _score(
        self, client: str, prompt: Prunable, options: PruneOptions, is_late: Event, check_cancelled: CheckCancelled
    ) -> PruneResult:
        def check(*_: object) -> None:
            check_cancelled()
            if is_late.is_set() and len(self.queue):
                raise ClientDisconnected

        conversation = self._take(client, options, prompt)
        try:
            with self.metrics.scoring_s.time():
                result = self._advance(conversation, prompt, check)
        except ClientDisconnected:
            self._keep(conversation)
            raise
        except Exception as error:
            # Without its message, which may quote the prompt.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning("scoring failed: %s at %s:%s", type(error).__name__, frame.filename, frame.lineno)
            if not isinstance(error, ValueError):
                # Out of memory: the caches of the other conversations may be what it lacks.
                self._conversations.clear()
            raise
        self._keep(conversation)
        return result

    def _advance(self, conversation: _Conversation, prompt: Prunable, check: Check) -> PruneResult:
        """Prune the turns after a conversation's last prompt, if any."""
        if conversation.result is not None and conversation.prompt == prompt:
            # A client that tries again.
            return conversation.result
        marker, num_whole = self._config.marker, 0
        least = self._pruner.config.min_prompt_tokens if conversation.options.keep_rate is None else 0
        begin = len(conversation.prompt)
        for start, stop in pairwise([begin, *_turns(prompt, begin), len(prompt)]):
            check()
            is_last = stop == len(prompt)
            # Short turns stay whole. They are read together: each reading renders all that came before.
            if not is_last and conversation.is_whole and _most_tokens(prompt[start:stop]) < least:
                num_whole = stop
                continue
            # A turn may hold no text.
            with suppress(ValueError):
                if num_whole:
                    conversation.prune(prompt[:num_whole], marker, check, _ALL_TOKENS)
            num_whole = 0
            with nullcontext() if is_last else suppress(ValueError):
                result = conversation.prune(prompt[:stop], marker, check)
        return result

    def _take(self, client: str, options: PruneOptions, prompt: Prunable) -> _Conversation:
        """Remove and return the client's conversation that a prompt continues furthest, or open one."""
        shared = [each.num_shared(client, options, prompt) for each in self._conversations]
        if not any(shared):
            pruner = self._pruner.conversation(SessionConfig(recall=self._config.recall))
            return _Conversation(client, options, pruner, prompt[:0], prompt)
        conversation = self._conversations.pop(shared.index(max(shared)))
        conversation.options, conversation.latest = options, prompt
        return conversation

    def _keep(self, conversation: _Conversation) -> None:
        kept, config = self._conversations, self._config
        kept.append(conversation)
        num_tokens = sum(each.pruner.num_cached_tokens for each in kept)
        while len(kept) > config.max_conversations or num_tokens > config.max_cached_tokens:
            num_tokens -= kept.pop(0).pruner.num_cached_tokens


def _turns(prompt: Any, start: int) -> list[int]:
    """The ends of earlier turns after message `start`: each answer follows one."""
    if isinstance(prompt, str):
        return []
    is_answer = [message["role"] == "assistant" for message in prompt]
    return [at for at in range(start + 1, len(prompt)) if is_answer[at] and not is_answer[at - 1]]


def _most_tokens(messages: Sequence[Any]) -> int:
    """A number of tokens that messages surely do not exceed."""
    return sum(_TEMPLATE_TOKENS + len(_as_bytes(message)) for message in messages)


def _as_bytes(prompt: Any) -> bytes:
    """What the draft reads of a prompt, and more."""
    return json.dumps(prompt, ensure_ascii=False).encode("utf-8", "replace")
