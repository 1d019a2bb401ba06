"""Conversations whose caches are kept between requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spec_stack.decode.lookup_index import TextMemory
from spec_stack.hf.prompt import EncodedPrompt

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.session import Session


class SessionStore:
    """Sessions by client. Used by one thread.

    Parameters
    ----------
    generator : SpecStackGenerator
        Opens them.
    max_sessions : int
        Most that are kept; the least recently used is closed first. Answers are remembered of as many clients.
    remembered_tokens : int
        Tokens of a client's earlier answers in which look-ups of all of its conversations look; 0 remembers none.
    """

    def __init__(self, generator: SpecStackGenerator, max_sessions: int, remembered_tokens: int = 0) -> None:
        self._generator, self._max, self._remembered_tokens = generator, max_sessions, remembered_tokens
        # In the order of their last use.
        self._memories: OrderedDict[str, TextMemory] = OrderedDict()
        # In the order of their last use.
        self._kept: list[tuple[str, Session]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def lend(self, client: str, prompt: EncodedPrompt) -> Iterator[Session]:
        """The session of this client that has dealt with the longest beginning of a prompt, else a new one.

        A session is of use only where the prompt goes on from its last question, and only to the client whose it is:
        what another one has written must not change an answer, nor how soon it comes. One in which an answer failed is
        not kept.
        """
        memory = self._memories.get(client) or self._new_memory()
        session = self._take(client, prompt) or self._generator.session(memory=memory)
        try:
            yield session
        except Exception:
            session.close()
            raise
        except BaseException:
            # A client who has gone leaves a conversation that can go on.
            self._keep(client, session, memory)
            raise
        self._keep(client, session, memory)

    def close(self) -> None:
        """Close all of them."""
        for _, session in self._kept:
            session.close()
        self._kept = []
        self._memories.clear()

    def _new_memory(self) -> TextMemory | None:
        """For a client's earlier answers, nobody else's: what is found in them comes sooner."""
        return TextMemory(self._remembered_tokens) if self._remembered_tokens and self._max else None

    def _take(self, client: str, prompt: EncodedPrompt) -> Session | None:
        lengths = [session.num_continued(encoded=prompt) if owner == client else 0 for owner, session in self._kept]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or not lengths[best]:
            return None
        return self._kept.pop(best)[1]

    def _keep(self, client: str, session: Session, memory: TextMemory | None) -> None:
        # Both in one order, so that whose session is kept is remembered too.
        if memory is not None:
            self._memories[client] = memory
            self._memories.move_to_end(client)
            if len(self._memories) > self._max:
                self._memories.popitem(last=False)
        self._kept.append((client, session))
        while len(self._kept) > self._max:
            self._kept.pop(0)[1].close()
