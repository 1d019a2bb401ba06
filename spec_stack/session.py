"""A conversation whose caches live on from call to call, and in which dropped text can come back."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.answering import Answering
from spec_stack.config import SamplingParams, SessionConfig
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt, PromptSource, encode_prompt, num_shared
from spec_stack.pair import DraftModel, ModelPair
from spec_stack.prefill.chunks import Evidence, by_anchors
from spec_stack.prefill.recall import dropped_positions, recall, select_turn
from spec_stack.prefill.scoring import LookAhead, score
from spec_stack.request import CallOptions, Request
from spec_stack.session_file import SavedSession
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
        if generator.config.prefill.scoring_layers is not None:
            raise ValueError(
                "a session's draft holds the whole conversation in all of its layers; open the generator with "
                "scoring_layers=None, and with calibration=False where a calibration sets it"
            )
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

    @property
    def dropped_positions(self) -> list[int]:
        """The positions of these, in order: what later turns may bring back."""
        held = self._conversation
        return dropped_positions(held.target.positions, len(held.token_ids))

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

    def fork(self, config: SessionConfig | None = None) -> Session:
        """A session that goes on from here by itself; what both share is copied only when one of them goes on.

        Parameters
        ----------
        config : SessionConfig, optional
            What it keeps and restores; None is this one's.
        """
        other = Session(self._generator, config or self.config)
        with self._answers():
            other._held = self._conversation.fork()
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file, from which `SpecStackGenerator.load_session` goes on.

        Parameters
        ----------
        path : str or Path
            One safetensors file: tokens, positions and both caches; what was configured stands in its header as JSON.
            It holds the conversation's text. The memory of both caches is its size.

        Raises
        ------
        ValueError
            Where the session is closed.
        RuntimeError
            While it answers a call.
        """
        with self._answers():
            self._conversation.saved(self.config).save(path, self._generator.pair, self._generator.config.prefill)

    @classmethod
    def load(cls, generator: SpecStackGenerator, path: str | Path, config: SessionConfig | None = None) -> Session:
        """A session from a file; see `SpecStackGenerator.load_session`."""
        saved = SavedSession.load(path, generator.pair, generator.config.prefill)
        session = cls(generator, config or saved.config)
        session._conversation.take_in(saved, path)
        return session

    def close(self) -> None:
        """Free the caches. The session cannot be used after it."""
        self._held = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a session can be neither copied nor pickled, for it holds caches; fork() makes another one")

    def _sampling(self) -> AbstractContextManager[Session]:
        return nullcontext(self)

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
            turn = held.begin(request, self.config, self._room(request))
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
    index
        The draft, over its own ids. Holds the tokens from the beginning on, maybe not yet the last ones; one with
        another tokenizer tokenizes every prompt anew, and holds what of it it had in common with the last one.
    """

    def __init__(self, pair: ModelPair, prefill_chunk: int) -> None:
        self._pair, self._prefill_chunk = pair, prefill_chunk
        self.token_ids: list[int] = []
        self.encoded: EncodedPrompt | None = None
        self.target = pair.open_target(prefill_chunk)
        self.index = pair.open_index(prefill_chunk)

    def fork(self) -> Conversation:
        other = Conversation(self._pair, self._prefill_chunk)
        other.token_ids, other.encoded = list(self.token_ids), self.encoded
        other.target = self.target.fork()
        other.index = self.index.fork()
        return other

    def saved(self, config: SessionConfig) -> SavedSession:
        """What is held, to be written to a file."""
        return SavedSession(self.token_ids, self.encoded, self.target.contents(), self.index.contents(), config)

    def take_in(self, saved: SavedSession, path: str | Path) -> None:
        """Hold what a file held. Raises ValueError where its parts do not fit together."""
        try:
            target, index = self.target.filled(saved.target), self.index.filled(saved.index)
        except ValueError as error:
            raise ValueError(f"cannot take {path} for a session: {error}") from error
        if target.next_position > len(saved.token_ids):
            raise ValueError(f"cannot take {path} for a session: it holds slots past its {len(saved.token_ids)} tokens")
        self.token_ids, self.encoded, self.target, self.index = saved.token_ids, saved.encoded, target, index

    def begin(self, request: Request, config: SessionConfig, room: float = math.inf) -> Turn:
        """Go back to what a request shares with the conversation. room: tokens that may be restored.

        Raises RuntimeError where the conversation has changed since the request was planned.
        """
        shared = num_shared(self.token_ids, request.prompt_ids)
        if shared < request.num_cached:
            raise RuntimeError("the session went on between this call and its first step; call again")
        del self.token_ids[shared:]
        self.target.forget_from(request.num_cached)
        if self._pair.translation is None:
            self.index.forget_from(min(shared, len(request.prompt_ids) - 1))
        return Turn(self._pair, request, config, room, self.target, self.index)

    def commit(self, request: Request, turn: Turn, answer_ids: Sequence[int], text: str | None) -> None:
        """Take in a turn's prompt and answer. text: the answer's, None where it is not that of its tokens."""
        token_ids = [*request.prompt_ids, *answer_ids]
        self.index = turn.index
        # What comes after the last token has been asked for, but the token itself has been through no model.
        self.token_ids = token_ids[:-1]
        self.target.forget_from(len(self.token_ids))
        if self._pair.translation is None:
            self.index.forget_from(len(self.token_ids))
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
        self.index = turn.index
        if self.index.is_stateful:
            self.index = self._pair.open_index(self._prefill_chunk)
        self.index.forget_from(turn.num_drafted)


class Turn:
    """The caches of a conversation as one request is answered over them (`caches.Caches`)."""

    def __init__(
        self,
        pair: ModelPair,
        request: Request,
        config: SessionConfig,
        room: float,
        target: CachedModel,
        index: CachedModel,
    ) -> None:
        self._pair, self._request, self._config, self._room = pair, request, config, room
        self.target, self.index = target, index
        self.draft: DraftModel = pair.view_draft(index, request.tokenization)
        self._held = list(target.positions)
        # Where the caches stood when the turn began.
        self.num_held, self.num_drafted = len(self._held), index.next_position
        self._dropped: list[int] = []
        if config.restore and config.max_restored_chunks and request.can_score and target.can_restore:
            self._dropped = dropped_positions(self._held, request.num_cached)

    @property
    def num_cached(self) -> int:
        return self._request.num_cached

    @property
    def needs_scoring(self) -> bool:
        return self._request.scores or bool(self._dropped)

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        request = self._request
        importance, proposal = score(self.draft, request.prompt_ids, look_ahead, request.prefill, request.tokenization)
        restored: list[int] = []
        if self._dropped:
            restored = recall(
                importance,
                self._dropped,
                request.num_cached,
                request.prefill.chunk_size,
                self._config,
                self._anchors(),
                max(0, self._room),
            )
        return self._select(restored, importance if request.scores else None), proposal

    def _anchors(self) -> torch.Tensor | None:
        """What chunks share with the new text, which is the question or ends with it."""
        if self._config.anchor_threshold is None:
            return None
        request = self._request
        asked = Evidence(request.prompt_ids, question=(request.num_cached, len(request.prompt_ids)))
        return by_anchors(asked, replace(request.prefill, neighbour_share=0.0))

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
        self.index, self.num_drafted = self._pair.open_index(self._request.prefill.prefill_chunk), 0
        self.draft = self._pair.view_draft(self.index, self._request.tokenization)
