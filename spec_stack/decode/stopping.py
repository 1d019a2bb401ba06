"""Stop conditions of a request, and its text as it grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from spec_stack.types import FinishReason

_INCOMPLETE = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Incremental detokenization: the increments concatenate to the decoded text. The latest tokens are decoded behind
    those of the previous increment, so that a leading space is kept.

    decode: of token ids. context_ids: the prompt's last tokens. piece_of: a token's text in the vocabulary.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context_ids: Sequence[int] = (),
        piece_of: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._decode, self._piece_of = decode, piece_of
        self._window = list(context_ids)
        while self._window and not self._is_settled(decode(self._window)):
            self._window.pop()
        self._remember()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, as far as it is final."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        added = text[len(self._context_text) :]
        if not added or not self._is_settled(text):
            return ""
        del self._window[: self._num_context]
        self._remember()
        return added

    def flush(self) -> str:
        """The pending text, as is."""
        return self._decode(self._window)[len(self._context_text) :]

    def _remember(self) -> None:
        """Use the window as context of later tokens."""
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window) if self._window else ""

    def _is_settled(self, text: str) -> bool:
        """Whether later tokens cannot change the window's text."""
        return not text.endswith(_INCOMPLETE) and not self._ends_in_bytes()

    def _ends_in_bytes(self) -> bool:
        """Whether the last token with text is a byte token: runs of bytes decode together."""
        for token_id in reversed(self._window):
            if _BYTE_PIECE.fullmatch(self._piece_of(token_id) or ""):
                return True
            if self._decode([token_id]):
                return False
        return False


class StopChecker:
    """Cuts every step's tokens at max_tokens, an end-of-sequence token or a stop string, and gives their text. A step
    that ends late is the last.

    Text that could still become a stop string is held back. Stateful: one per request. Raises ValueError for stop
    strings without a text.

    end_ids: tokens that end the request; they count, and have no text. stop: strings that end it; their tokens count,
    and their text is not given. stop_ids: further end tokens, reported like a stop string. is_late: whether the time
    is over.
    """

    def __init__(
        self,
        max_tokens: int,
        end_ids: Collection[int],
        stop: Sequence[str] = (),
        text: TextStream | None = None,
        stop_ids: Collection[int] = (),
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        if stop and text is None:
            raise ValueError("stop strings need a tokenizer")
        self.num_left = max_tokens
        self._end_ids = end_ids
        self._stop_ids = stop_ids
        self._is_late = is_late
        self._stop = tuple(stop)
        self._text = text
        self._buffered = ""

    def cut(self, token_ids: list[int]) -> tuple[list[int], str, FinishReason | None]:
        """The counted tokens of this step, their text, and the finish reason, if any."""
        kept, reason = self._cut_tokens(token_ids)
        # The token that ends a text is not part of it, whether or not the tokenizer knows it as special.
        written = kept[:-1] if reason in ("eos", "stop") else kept
        text, num_written = "", None
        if self._stop:
            num_written, text = self._cut_text(written)
            if num_written is not None:
                kept, reason = kept[:num_written], "stop"
        elif self._text:
            text = self._text.push(written)
        self.num_left -= len(kept)
        if self._text and reason is not None and num_written is None:
            text += self._buffered + self._text.flush()
        return kept, text, reason

    def _cut_tokens(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        kept = token_ids[: self.num_left]
        for num, token_id in enumerate(kept, 1):
            if token_id in self._end_ids:
                return kept[:num], "eos"
            if token_id in self._stop_ids:
                return kept[:num], "stop"
        if len(kept) == self.num_left:
            return kept, "length"
        return kept, "time" if self._is_late() else None

    def _cut_text(self, token_ids: list[int]) -> tuple[int | None, str]:
        """How many tokens complete a stop string (None: no match), and the text released."""
        text = ""
        for num, token_id in enumerate(token_ids, 1):
            seen = self._see(token_id)
            found = [index for index in map(seen.find, self._stop) if index >= 0]
            if found:
                return num, text + seen[: min(found)]
            release = len(self._buffered) - self._longest_stop_start()
            text, self._buffered = text + self._buffered[:release], self._buffered[release:]
        return None, text

    def _see(self, token_id: int) -> str:
        """Add a token; return the buffered text, incomplete characters excluded."""
        if self._text is None:
            return ""
        self._buffered += self._text.push([token_id])
        return self._buffered + self._text.flush().rstrip(_INCOMPLETE)

    def _longest_stop_start(self) -> int:
        """Length of the longest suffix of the buffered text that begins a stop string."""
        longest = min(len(self._buffered), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._buffered[-length:]) for stop in self._stop):
                return length
        return 0
