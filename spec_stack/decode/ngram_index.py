"""N-gram lookup: where the last tokens of a text stand in it, or in other requests' latest texts, and what followed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from threading import RLock

from spec_stack.controller.ngram import NgramToken

MAX_LOOKED_IN = 262_144
"""Most tokens that the n-gram index of one text holds, some 300 bytes each."""
# Prompt tokens remembered with an answer, so that its beginning is found too; and context kept where a text diverges.
_CONTEXT = 32
# Tokens of a text's end that are compared.
_LONGEST = 64
# Lengths of the indexed n-grams, the longer first, and the newest places of each that are compared.
_ORDERS = (3, 1)
_MOST_PLACES = 16
# Between two texts; no token.
_BORDER = -1


class Ngrams:
    """The n-grams of a growing set of texts, with the places behind them.

    Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding); of several places the one with the
    longest match, and of these the most frequent continuation, as in SuffixDecoding (https://arxiv.org/abs/2411.04975).
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._start = 0

    def begin_text(self) -> None:
        """Begin another text, unconnected to the last one."""
        if len(self.ids) > self._start:
            self.ids.append(_BORDER)
            self._start = len(self.ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the text, a microsecond each."""
        for token_id in token_ids:
            self.ids.append(token_id)
            stop = len(self.ids)
            for order in _ORDERS:
                if stop - order >= self._start:
                    places = self._places.setdefault(tuple(self.ids[stop - order :]), [])
                    places.append(stop)
                    if len(places) > 2 * _MOST_PLACES:
                        del places[:_MOST_PLACES]

    def longest(self, context: Sequence[int]) -> tuple[int, list[int]]:
        """The longest match of the context's end, in tokens, and the places behind it, increasing; 0 without one."""
        for order in _ORDERS:
            known = self._places.get(tuple(context[-order:]), ()) if len(context) >= order else ()
            # The newest place may be the text's own end, behind which nothing stands yet.
            places = [place for place in known[-_MOST_PLACES - 1 :] if self.goes_on(place)]
            if places:
                lengths = [self._match_length(context, place, order) for place in places]
                best = max(lengths)
                return best, [place for place, length in zip(places, lengths, strict=True) if length == best]
        return 0, []

    def goes_on(self, place: int) -> bool:
        return place < len(self.ids) and self.ids[place] != _BORDER

    def _match_length(self, context: Sequence[int], place: int, known: int) -> int:
        length, most = known, min(_LONGEST, len(context), place)
        while length < most and self.ids[place - 1 - length] == context[-1 - length]:
            length += 1
        return length


class SharedNgramCache:
    """The latest texts, in bounded memory: when the newer of two indexes is full, the older one goes. Thread-safe.

    max_tokens: most tokens in both, 2 or more (else ValueError); at least the last half of them is kept.
    """

    def __init__(self, max_tokens: int = MAX_LOOKED_IN) -> None:
        if max_tokens < 2:
            raise ValueError(f"a memory of texts needs room for 2 tokens or more, got {max_tokens}")
        self._lock = RLock()
        self._newest = Ngrams()
        self._older = Ngrams()
        self._most = max_tokens // 2

    @property
    def num_tokens(self) -> int:
        return len(self._newest.ids) + len(self._older.ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the text."""
        coming = iter(token_ids)
        with self._lock:
            while part := list(islice(coming, self._most - len(self._newest.ids))):
                self._newest.extend(part)
                self._renew_when_full()

    def begin_text(self) -> None:
        """Begin another text, unconnected to the last one."""
        with self._lock:
            self._newest.begin_text()
            self._renew_when_full()

    def remember(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Add an answer, with the end of its prompt."""
        with self._lock:
            self.begin_text()
            self.extend(prompt_ids[-_CONTEXT:])
            self.extend(answer_ids)

    def continuation(
        self, context: Sequence[int], end_ids: Collection[int] = (), is_shared: bool = False
    ) -> Iterator[NgramToken]:
        """The most frequent continuation of the longest matching end of the context, token by token.

        Of equally frequent tokens the latest. Where the text ends, the lengthened context is searched again, so a text
        that repeats itself goes on for ever. end_ids: tokens that end it.
        """
        text = list(context)
        ngrams, length, places = self._longest(text)
        while places:
            after: dict[int, list[int]] = {}
            for place in places:
                after.setdefault(ngrams.ids[place], []).append(place)
            token_id, same = max(after.items(), key=lambda each: (len(each[1]), each[1][-1]))
            yield NgramToken(token_id, length, len(same), len(places) - len(same), is_shared)
            if token_id in end_ids:
                return
            text.append(token_id)
            length, places = length + 1, [place + 1 for place in same if ngrams.goes_on(place + 1)]
            if not places:
                ngrams, length, places = self._longest(text)

    def _longest(self, context: Sequence[int]) -> tuple[Ngrams, int, list[int]]:
        with self._lock:
            found = [(ngrams, *ngrams.longest(context)) for ngrams in (self._newest, self._older)]
        return max(found, key=lambda each: each[1])

    def _renew_when_full(self) -> None:
        if len(self._newest.ids) >= self._most:
            self._older, self._newest = self._newest, Ngrams()


class NgramIndex:
    """Finds continuations of a growing text by earlier occurrences of its end. Not thread-safe.

    shared: read-only texts of other requests. max_tokens: most remembered tokens of the text itself.
    """

    def __init__(self, shared: SharedNgramCache | None = None, max_tokens: int = MAX_LOOKED_IN) -> None:
        self._own = SharedNgramCache(max_tokens)
        self._shared = shared
        self._text: list[int] = []

    def __len__(self) -> int:
        """Tokens of the text so far."""
        return len(self._text)

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

    def continuations(self, tail_ids: Sequence[int] = (), end_ids: Collection[int] = ()) -> list[Iterator[NgramToken]]:
        """Continuations from the request's own text and from the shared texts, as lazy iterators.

        They may be endless where a text repeats itself. tail_ids: uncertain tokens behind the text, looked up but not
        added. end_ids: tokens that end a continuation.
        """
        context = [*self._text[-_LONGEST:], *tail_ids]
        found = [self._own.continuation(context, end_ids)]
        if self._shared is not None:
            found.append(self._shared.continuation(context, end_ids, is_shared=True))
        return found
