"""A conversation with persistent caches and recall of dropped text."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from spec_stack.api.answering import GenerationMixin, collect
from spec_stack.config import SessionConfig
from spec_stack.decode.ngram_index import SharedNgramCache
from spec_stack.engine.conversation import Conversation
from spec_stack.engine.conversation_file import save_conversation
from spec_stack.engine.engine import Engine
from spec_stack.engine.request import Call, Request
from spec_stack.hf.prompt import EncodedPrompt, num_shared, splice
from spec_stack.settings.checks import require_config
from spec_stack.settings.warning import OnceEach
from spec_stack.types import GenerationResult, StepOutput


class Session(GenerationMixin):
    """`generate` and `stream` of a generator, with caches that are kept between the calls.

    Every call takes the whole prompt, as without a session. The prefix shared with the previous prompt and answer is
    cached, and only the rest is prefilled. After an edit, both caches roll back to the last common token.

    The target's cache holds the kept tokens, the draft's cache all tokens. The draft scores dropped chunks for a later
    turn, and recalled chunks are prefilled at their original positions, with the new text, and stay.

    A turn that is cancelled before its first token leaves the session unchanged, but for the rollback to an edit.

    Parameters
    ----------
    engine : Engine
        The generator's engine (`SpecStackGenerator.session` opens sessions).
    config : SessionConfig, optional
        Recall of dropped text; None is the generator's.
    ngram_cache : SharedNgramCache, optional
        Further answers for look-ups, to which this session's are added. Share one only between sessions of one user.

    Notes
    -----
    A token attends to the earlier text that is cached when it is written. Recalled text is dropped by an edit before it
    alone. A session may therefore keep other text than a new one; at keep_rate 1.0 both are
    equal.

    A session answers one call at a time. Sessions of one generator are independent.

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

    def __init__(
        self, engine: Engine, config: SessionConfig | None = None, ngram_cache: SharedNgramCache | None = None
    ) -> None:
        self.config = require_config(engine.config.session if config is None else config, SessionConfig)
        if ngram_cache is not None and not isinstance(ngram_cache, SharedNgramCache):
            raise ValueError(f"ngram_cache must be a SharedNgramCache, got {type(ngram_cache).__name__}")
        self.engine = engine
        self._open: Conversation | None = Conversation(engine.pair, engine.config.prefill.prefill_chunk, ngram_cache)
        self._answering = threading.Lock()
        self._warnings = OnceEach()

    @property
    def conversation(self) -> Conversation:
        """The caches of both models. Raises ValueError for a closed session."""
        if self._open is None:
            raise ValueError("this session is closed; open another one")
        return self._open

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the target's cache."""
        return len(self.conversation.target.positions)

    @property
    def dropped_positions(self) -> list[int]:
        """Positions of the dropped tokens in order; later turns may recall them."""
        conversation = self.conversation
        return sorted({*range(len(conversation.token_ids))}.difference(conversation.target.positions))

    def num_continued(self, encoded: EncodedPrompt) -> int:
        """Tokens of the conversation that a prompt continues; 0 for another conversation.

        All of them, or those up to the last answer if the client changed it: reasoning left out, or a tool call with
        other whitespace.
        """
        known, pair = self.conversation, self.engine.pair
        encoded = encoded if known.encoded is None else splice(pair.tokenizer, encoded, known.encoded)
        turns = pair.read(known.encoded).turns if known.encoded is not None and known.encoded.text else ()
        num_least = max((turn.span[1] for turn in turns if turn.role == "user"), default=len(known.token_ids))
        num_continued = num_shared(known.token_ids, encoded.token_ids[:-1])
        # A repeated question is no conversation: recalled text would change its answer.
        is_repeated = num_continued == len(encoded.token_ids) - 1 < len(known.token_ids)
        return num_continued if num_continued >= num_least and not is_repeated else 0

    def fork(self, config: SessionConfig | None = None) -> Session:
        """An independent copy of the session; shared caches are copied on write.

        Parameters
        ----------
        config : SessionConfig, optional
            Recall of dropped text; None is this session's.
        """
        other = Session(self.engine, config or self.config)
        with self._answers():
            other._open = self.conversation.fork()
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file for `SpecStackGenerator.load_session`.

        Parameters
        ----------
        path : str or Path
            One safetensors file with tokens, positions, both caches, and the configuration as JSON in its header. It
            contains the conversation's text, and is as large as both caches.

        Raises
        ------
        ValueError
            For a closed session, and for a file that cannot be written, which is then removed.
        RuntimeError
            While the session answers a call.
        """
        with self._answers():
            save_conversation(self.conversation, path, self.config, self.engine.pair, self.engine.config.prefill)

    def close(self) -> None:
        """Free the caches. The session cannot be used afterwards."""
        self._open = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a session can be neither copied nor pickled, for it holds caches; fork() makes another one")

    def _sample(self, calls: Sequence[Call]) -> list[GenerationResult]:
        results = [collect(*self._begin(calls[0]))]
        for call in calls[1:]:
            with self.fork(SessionConfig(recall=False)) as other:
                results.append(collect(*other._begin(call)))
        return results

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, call: Call) -> tuple[Request, Generator[StepOutput, None, None]]:
        conversation = self.conversation
        request = self.engine.plan(call, conversation.encoded)
        self._say_that_it_begins_anew(call, request)
        return request, self._run(request)

    def _say_that_it_begins_anew(self, call: Call, request: Request) -> None:
        """Warn if only the new message is given: without earlier turns it starts another conversation."""
        messages, known_ids = call.get("messages"), self.conversation.token_ids
        if not known_ids or messages is None or any(message["role"] == "assistant" for message in messages):
            return
        num_continued = num_shared(known_ids, request.prompt_ids)
        if 2 * num_continued < len(known_ids):
            self._warnings.warn(
                "anew",
                f"this call shares {num_continued} of the conversation's {len(known_ids)} tokens, "
                "which begins anew with it: a session is given all messages every time, with its answers among them",
            )

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Hold the session's lock; raises if another call holds it."""
        if not self._answering.acquire(blocking=False):
            raise RuntimeError(
                "this session is answering another call; end or close that stream, or fork the session before it"
            )
        try:
            yield
        finally:
            self._answering.release()

    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        with self._answers():
            conversation = self.conversation
            # Reading the prompt counts.
            request.clock.resume()
            turn = conversation.begin(request, self.config)
            answer_ids: list[int] = []
            text = ""
            try:
                with closing(self.engine.answer(request, turn)) as outputs:
                    for output in outputs:
                        answer_ids += output.token_ids
                        text += output.text
                        yield output
            except GeneratorExit:
                # The caller stopped early; delivered tokens belong to the conversation.
                pass
            except BaseException:
                conversation.recover(turn)
                raise
            # The text of other tokens lags behind, or lacks a stop string.
            is_whole = output.finish_reason in ("eos", "length", "time")
            conversation.commit(request, turn, answer_ids, text if is_whole else None)
