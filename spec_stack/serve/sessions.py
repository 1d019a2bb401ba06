"""Sessions with caches kept between requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
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
        self._generator, self._max, self._remembered_tokens = generator, max_sessions, ngram_cache_tokens
        # Both in order of last use.
        self._memories: OrderedDict[str, SharedNgramCache] = OrderedDict()
        self._kept: list[tuple[str, Session]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def lend(self, client: str, prompt: EncodedPrompt) -> Iterator[Session]:
        """The client's session with the longest common prefix, or a new one; dropped on failure. Other clients'
        sessions are never used: latency and recalled tokens would leak their texts."""
        memory = self._memories.get(client) or self._new_memory()
        session = self._take(client, prompt) or self._generator.session(ngram_cache=memory)
        try:
            yield session
        except Exception:
            session.close()
            raise
        except BaseException:
            # After a disconnect the conversation can continue.
            self._keep(client, session, memory)
            raise
        self._keep(client, session, memory)

    def close(self) -> None:
        for _, session in self._kept:
            session.close()
        self._kept = []
        self._memories.clear()

    def _new_memory(self) -> SharedNgramCache | None:
        """One client's memory: a shared one would leak answers through latency."""
        return SharedNgramCache(self._remembered_tokens) if self._remembered_tokens and self._max else None

    def _take(self, client: str, prompt: EncodedPrompt) -> Session | None:
        lengths = [session.num_continued(encoded=prompt) if owner == client else 0 for owner, session in self._kept]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or not lengths[best]:
            return None
        return self._kept.pop(best)[1]

    def _keep(self, client: str, session: Session, memory: SharedNgramCache | None) -> None:
        if memory is not None:
            self._memories[client] = memory
            self._memories.move_to_end(client)
            if len(self._memories) > self._max:
                self._memories.popitem(last=False)
        self._kept.append((client, session))
        while len(self._kept) > self._max:
            self._kept.pop(0)[1].close()
