"""Sessions with caches kept between requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from spec_stack.decode.ngram_index import SharedNgramCache
from spec_stack.hf.prompt import EncodedPrompt

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session


class SessionStore:
    """Least-recently-used sessions, and each client's n-gram memory; single-threaded. max_sessions limits the sessions,
    and the number of clients with a memory."""

    def __init__(self, generator: SpecStackGenerator, max_sessions: int, ngram_cache_tokens: int = 0) -> None:
        self._generator, self._max = generator, max_sessions
        # In order of last use.
        self._kept: list[tuple[str, Session]] = []

        @lru_cache(max_sessions)
        def memory_of(client: str) -> SharedNgramCache | None:
            """A shared one would leak answers through latency."""
            return SharedNgramCache(ngram_cache_tokens) if ngram_cache_tokens else None

        self._memory_of = memory_of

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def lend(self, client: str, prompt: EncodedPrompt) -> Iterator[Session]:
        """The client's session with the longest common prefix, or a new one; dropped on failure. Other clients'
        sessions are never used: latency and recalled tokens would leak their texts."""
        lengths = [session.num_continued(encoded=prompt) if owner == client else 0 for owner, session in self._kept]
        longest, memory = max(lengths, default=0), self._memory_of(client)
        session = self._kept.pop(lengths.index(longest))[1] if longest else self._generator.session(ngram_cache=memory)
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
