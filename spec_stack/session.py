"""A conversation whose caches live on from call to call, and in which dropped text can come back."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.answering import Answering
from spec_stack.config import SamplingParams, SessionConfig
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt, PromptSource, encode_prompt, num_shared
from spec_stack.pair import DraftModel, ModelPair
from spec_stack.prefill.recall import dropped_positions, recall, select_turn
from spec_stack.prefill.scoring import LookAhead, score
from spec_stack.request import CallOptions, Request
from spec_stack.types import Proposal, Selection, StepOutput

if TYPE_CHECKING:
    from spec_stack.generator import SpecStackGenerator


class Session(Answering):
    """`generate` and `stream` of a generator, with caches that are kept between the calls.

    Every call is given the whole prompt, as without a session. What it shares with the prompt and the answer of the
    call before, from the beginning on, has been dealt with, and only the rest goes through the models. Where it
    differs (an edited message, an answer to be made anew), both caches go back to the last token in common.

    The target's cache holds what was kept; the draft's holds everything, and so can tell which dropped chunks a later
    turn wants: these are prefilled at their original positions, ahead of the turn's new text, and stay.

    Parameters
    ----------
    generator : SpecStackGenerator
        Whose models, tokenizer, configuration and policies are used.
    config : SessionConfig, optional
        What is kept and restored; None is the generator's.

    Notes
    -----
    A token sees every token written before it, also those restored before it at larger positions. So what a turn
    restored stays after an edit of that turn (it has seen nothing of it), and goes with an edit of an earlier one. A
    session may therefore hold other dropped text than a new one would; at keep_rate 1.0 both are the same.

    A session answers one call at a time. Sessions of one generator do not disturb each other.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator
    >>> messages = [{"role": "user", "content": "Give three tips."}]
    >>> with SpecStackGenerator.from_pretrained().session() as session:
    ...     first = session.generate(messages=messages, max_tokens=16)
    ...     messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    ...     second = session.generate(messages=messages, max_tokens=16)
    >>> second.metrics.num_cached_tokens > first.metrics.num_prompt_tokens
    True
    """

    def __init__(self, generator: SpecStackGenerator, config: SessionConfig | None = None) -> None:
        if config is not None and not isinstance(config, SessionConfig):
            raise ValueError(f"config must be a SessionConfig, got {type(config).__name__}")
        self.config = config or generator.config.session
        self._generator = generator
        self._held: Conversation | None = Conversation(generator.pair, generator.config.prefill.prefill_chunk)
        self._answering = threading.Lock()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the target's cache holds."""
        return self._conversation.target.num_cached

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens of the conversation that the target's cache lacks."""
        return len(self._conversation.token_ids) - self.num_cached_tokens

    def num_continued(self, **prompt: Any) -> int:
        """Tokens of the conversation where all of them are the beginning of a prompt; 0 where they are not.

        Parameters
        ----------
        **prompt
            As it is given to `generate`: prompt, messages, tools and the like.
        """
        held, pair = self._conversation, self._generator.pair
        encoded = encode_prompt(pair.tokenizer, pair.vocab_size, PromptSource(**prompt), held.encoded)
        num_held = len(held.token_ids)
        return num_held if num_shared(held.token_ids, encoded.token_ids[:-1]) == num_held else 0

    def fork(self) -> Session:
        """A session that goes on from here by itself; what both share is copied only when one of them goes on."""
        other = Session(self._generator, self.config)
        with self._answers():
            other._held = self._conversation.fork()
        return other

    def close(self) -> None:
        """Free the caches. The session cannot be used after it."""
        self._held = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _conversation(self) -> Conversation:
        if self._held is None:
            raise ValueError("this session is closed; open another one")
        return self._held

    def _plan(self, source: PromptSource, params: SamplingParams, options: CallOptions) -> Request:
        held = self._conversation
        request = self._generator.plan(source, params, options, held.token_ids, held.encoded)
        if request.num_cached and self._room(request) < 0:
            request = self._generator.plan(source, params, options, (), held.encoded)
        return request

    def _room(self, request: Request) -> float:
        """Tokens that may be restored before the target's cache is over its bound."""
        if self.config.max_cached_tokens is None:
            return math.inf
        rate = request.prefill.rate_for(request.num_new_tokens) if request.scores else 1.0
        num_held = sum(position < request.num_cached for position in self._conversation.target.positions)
        return self.config.max_cached_tokens - num_held - math.ceil(rate * request.num_new_tokens)

    def _answers(self) -> OneAtATime:
        return OneAtATime(self._answering)

    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        with self._answers():
            held = self._conversation
            room = self._room(request)
            config = self.config
            if room < math.inf:
                most = max(0, int(room)) // request.prefill.chunk_size
                config = replace(config, max_restored_chunks=min(config.max_restored_chunks, most))
            turn = held.begin(request, config)
            answer_ids: list[int] = []
            text = ""
            try:
                with closing(self._generator.answer(request, turn)) as outputs:
                    for output in outputs:
                        answer_ids += output.token_ids
                        text += output.text
                        yield output
            except GeneratorExit:
                # The caller had enough; what he was given is part of the conversation. Its text may lag behind.
                held.commit(request, turn, answer_ids, None)
                raise
            except BaseException:
                held.recover(request, turn)
                raise
            held.commit(request, turn, answer_ids, None if output.finish_reason == "stop" else text)


class OneAtATime:
    """Holds a session's lock, which is refused where another call has it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is answering another call; end or close that stream, or fork the session before it"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Conversation:
    """What target and draft hold of one text.

    Parameters
    ----------
    pair : ModelPair
        The models.
    prefill_chunk : int
        Most tokens in one forward.

    Attributes
    ----------
    token_ids
        All tokens that were dealt with, prefilled or dropped. Token i is at position i in both caches.
    encoded
        The last prompt as it was encoded, with its answer.
    target
        Holds what was kept and restored, in the order in which it was written.
    draft
        Holds the tokens from the beginning on, maybe not yet the last ones. None for one with another tokenizer, which
        tokenizes a longer text in another way, and so begins every turn anew.
    """

    def __init__(self, pair: ModelPair, prefill_chunk: int) -> None:
        self._pair, self._prefill_chunk = pair, prefill_chunk
        self.token_ids: list[int] = []
        self.encoded: EncodedPrompt | None = None
        self.target = pair.open_target(prefill_chunk)
        self.draft = pair.open_index(prefill_chunk)

    def fork(self) -> Conversation:
        other = Conversation(self._pair, self._prefill_chunk)
        other.token_ids, other.encoded = list(self.token_ids), self.encoded
        other.target = self.target.fork()
        other.draft = self.draft and self.draft.fork()
        return other

    def begin(self, request: Request, config: SessionConfig) -> Turn:
        """Go back to what a request shares with the conversation.

        Raises RuntimeError where the conversation has changed since the request was planned.
        """
        shared = num_shared(self.token_ids, request.prompt_ids)
        if shared < request.num_cached:
            raise RuntimeError("the session went on between this call and its first step; call again")
        del self.token_ids[shared:]
        self.target.forget_from(request.num_cached)
        if self.draft is not None:
            self.draft.forget_from(min(shared, len(request.prompt_ids) - 1))
        return Turn(self._pair, request, config, self.target, self.draft)

    def commit(self, request: Request, turn: Turn, answer_ids: Sequence[int], text: str | None) -> None:
        """Take in a turn's prompt and answer. text: the answer's, None where it is not that of its tokens."""
        token_ids = [*request.prompt_ids, *answer_ids]
        self.draft = turn.index
        # What comes after the last token has been asked for, but the token itself has been through no model.
        self.token_ids = token_ids[:-1]
        self.target.forget_from(len(self.token_ids))
        if self.draft is not None:
            self.draft.forget_from(len(self.token_ids))
        encoded = request.encoded
        if encoded is not None and text is not None:
            ended = bool(answer_ids) and answer_ids[-1] in self._pair.end_ids
            encoded = encoded.with_answer(answer_ids[:-1] if ended else answer_ids, text)
        self.encoded = encoded

    def recover(self, request: Request, turn: Turn) -> None:
        """Go back to where a turn that failed, maybe in the middle of a forward, began."""
        if self.target.is_stateful:
            # Nobody knows how far a state has come.
            self.token_ids, self.encoded = [], None
            self.target = self._pair.open_target(self._prefill_chunk)
        del self.token_ids[request.num_cached :]
        self.target.rollback(max(0, self.target.num_cached - turn.num_held))
        self.draft = turn.index
        if self.draft is not None and self.draft.is_stateful:
            self.draft = self._pair.open_index(self._prefill_chunk)
        if self.draft is not None:
            self.draft.forget_from(min(request.num_cached, turn.num_drafted))


class Turn:
    """The caches of a conversation as one request is answered over them (`caches.Caches`)."""

    def __init__(
        self,
        pair: ModelPair,
        request: Request,
        config: SessionConfig,
        target: CachedModel,
        index: CachedModel | None,
    ) -> None:
        self._pair, self._request, self._config = pair, request, config
        self.target, self.index = target, index
        self.draft: DraftModel = index or pair.open_draft(request.prefill.prefill_chunk, request.tokenization)
        self._held = list(target.positions)
        # Where the caches stood when the turn began.
        self.num_held, self.num_drafted = len(self._held), self.draft.next_position
        self._dropped: list[int] = []
        if config.restore and config.max_restored_chunks and request.can_score and target.can_restore:
            self._dropped = dropped_positions(self._held, request.num_cached)

    @property
    def needs_scoring(self) -> bool:
        return self._request.scores or bool(self._dropped)

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        request = self._request
        importance, proposal = score(self.draft, request.prompt_ids, look_ahead, request.prefill, request.tokenization)
        restored: list[int] = []
        if self._dropped:
            restored = recall(importance, self._dropped, request.num_cached, request.prefill.chunk_size, self._config)
        return self._select(restored, importance if request.scores else None), proposal

    def take_all(self) -> Selection:
        return self._select()

    def _select(self, restored: Sequence[int] = (), importance: torch.Tensor | None = None) -> Selection:
        request = self._request
        return select_turn(
            request.prompt_ids,
            self._held,
            request.num_cached,
            restored,
            importance,
            request.prefill,
            request.protected,
        )

    def reopen_draft(self) -> None:
        prefill_chunk = self._request.prefill.prefill_chunk
        self.index, self.num_drafted = self._pair.open_index(prefill_chunk), 0
        self.draft = self.index or self._pair.open_draft(prefill_chunk, self._request.tokenization)
