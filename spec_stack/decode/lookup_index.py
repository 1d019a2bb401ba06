"""The texts that look-ups search: the request's own, and other requests' latest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from threading import RLock
from weakref import WeakKeyDictionary

from spec_stack.controller.lookup import Found
from spec_stack.decode.suffixes import START, Place, Step, SuffixAutomaton

MAX_LOOKED_IN = 262_144
"""Most tokens that the look-ups of one text remember, some 200 bytes each."""
# Prompt tokens remembered with an answer, so that its beginning is found too; and context kept where a text diverges.
_CONTEXT = 32
# Tokens of a text's end that are looked up.
_LONGEST = 64


class TextMemory:
    """The latest texts, in bounded memory: when the newer of two automata is full, the older one goes. Thread-safe.

    max_tokens: most tokens in both, 2 or more (else ValueError); at least the last half of them is kept.
    """

    def __init__(self, max_tokens: int = MAX_LOOKED_IN) -> None:
        if max_tokens < 2:
            raise ValueError(f"a memory of texts needs room for 2 tokens or more, got {max_tokens}")
        self.lock = RLock()
        self.newest = SuffixAutomaton()
        self.older: SuffixAutomaton | None = None
        self._most = max_tokens // 2

    @property
    def num_tokens(self) -> int:
        return self.newest.num_tokens + (self.older.num_tokens if self.older is not None else 0)

    @property
    def automata(self) -> list[SuffixAutomaton]:
        """The newest one first."""
        return [self.newest] if self.older is None else [self.newest, self.older]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the text."""
        coming = iter(token_ids)
        with self.lock:
            while part := list(islice(coming, self._most - self.newest.num_tokens)):
                self.newest.extend(part)
                if self.newest.num_tokens == self._most:
                    self.older, self.newest = self.newest, SuffixAutomaton()

    def begin_text(self) -> None:
        """Begin another text, unconnected to the last one."""
        with self.lock:
            self.newest.begin_text()

    def remember(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Add an answer, with the end of its prompt."""
        with self.lock:
            self.begin_text()
            self.extend(prompt_ids[-_CONTEXT:])
            self.extend(answer_ids)


class Reader:
    """A growing text's place in a memory's automata. Mutated by `advance`."""

    def __init__(self, memory: TextMemory) -> None:
        self._memory = memory
        # Weak: an idle text must not keep evicted automata alive.
        self._places: WeakKeyDictionary[SuffixAutomaton, Place] = WeakKeyDictionary()

    def advance(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > _LONGEST:
            self._places.clear()
            token_ids = token_ids[-_LONGEST:]
        with self._memory.lock:
            self._places = WeakKeyDictionary(self._after(token_ids))

    def continuation(self, tail_ids: Sequence[int]) -> Iterator[Step]:
        """The most frequent continuation of the longest matching end of text and uncertain tail, token by token.

        Where a place has no successor, a shorter end goes on.
        """
        with self._memory.lock:
            found = [(automaton, automaton.next(place)) for automaton, place in self._after(tail_ids)]
        automaton, step = max(found, key=lambda each: each[1].length if each[1] is not None else 0)
        while step is not None:
            yield step
            with self._memory.lock:
                step = automaton.next(step.place)

    def _after(self, token_ids: Sequence[int]) -> list[tuple[SuffixAutomaton, Place]]:
        found = []
        for automaton in self._memory.automata:
            place = self._places.get(automaton, START)
            for token_id in token_ids:
                place = automaton.follow(place, token_id)
            found.append((automaton, place))
        return found


class LookupIndex:
    """Finds continuations of a growing text by earlier occurrences of its end. Not thread-safe.

    shared: read-only texts of other requests. max_tokens: most remembered tokens of the text itself.
    """

    def __init__(self, shared: TextMemory | None = None, max_tokens: int = MAX_LOOKED_IN) -> None:
        self._own = TextMemory(max_tokens)
        self._readers = [(Reader(self._own), False)]
        if shared is not None:
            self._readers.append((Reader(shared), True))
        self._text: list[int] = []
        self._may_differ = False

    def __len__(self) -> int:
        """Tokens of the text so far."""
        return len(self._text)

    def reopen(self) -> None:
        """The next `read` may bring another text."""
        self._may_differ = True

    def read(self, text_ids: Sequence[int]) -> None:
        """Add the new part of the text, given whole."""
        if self._may_differ:
            self._may_differ = False
            self.begin(text_ids)
        else:
            self.extend(text_ids[len(self._text) :])

    def begin(self, text_ids: Sequence[int]) -> None:
        """Go on with a text that may differ from the last: the common prefix is not added again, the old rest stays
        findable.
        """
        if list(text_ids[: len(self._text)]) != self._text:
            pairs = enumerate(zip(self._text, text_ids, strict=False))
            num_same = next((at for at, (mine, other) in pairs if mine != other), len(text_ids))
            self._own.begin_text()
            del self._text[max(0, num_same - _CONTEXT) :]
        self.extend(text_ids[len(self._text) :])

    def extend(self, token_ids: Sequence[int]) -> None:
        self._text += token_ids
        self._own.extend(token_ids)
        for reader, _ in self._readers:
            reader.advance(token_ids)

    def continuations(self, tail_ids: Sequence[int] = (), end_ids: Collection[int] = ()) -> list[Iterator[Found]]:
        """Continuations from the request's own text and from the shared texts, as lazy iterators.

        They may be endless where a text repeats itself. tail_ids: uncertain tokens behind the text, looked up but not
        added. end_ids: tokens that end a continuation.
        """
        return [_found(reader.continuation(tail_ids), end_ids, is_shared) for reader, is_shared in self._readers]


def _found(steps: Iterable[Step], end_ids: Collection[int], is_shared: bool) -> Iterator[Found]:
    for step in steps:
        yield Found(step.token_id, step.length, step.num_seen, step.num_others, is_shared)
        if step.token_id in end_ids:
            return
