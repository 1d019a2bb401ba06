"""Text of a growing list of token ids, in increments that concatenate to the text of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from spec_stack.decode.stopping import TextStream

_INCOMPLETE = "\ufffd"
# Tokens of the prompt that the first generated one is decoded after.
_NUM_CONTEXT = 8
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def open_text_stream(tokenizer: Any, prompt_ids: Sequence[int]) -> TextStream | None:
    """The stream for a text that goes on after a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return WindowedText(decode, prompt_ids[-_NUM_CONTEXT:], tokenizer.convert_ids_to_tokens)


class WindowedText:
    """By decoding the last tokens anew, together with those of the increment before them.

    A decoder may treat the beginning of a text apart: SentencePiece-style ones drop its first space, which belongs to a
    continuation all the same.
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
        """The text that these tokens add, as far as it is certain."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        added = text[len(self._context_text) :]
        if not added or not self._is_settled(text):
            return ""
        del self._window[: self._num_context]
        self._remember()
        return added

    def flush(self) -> str:
        """What is held back, as it stands."""
        return self._decode(self._window)[len(self._context_text) :]

    def _remember(self) -> None:
        """Take the window for the context of the tokens to come."""
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window) if self._window else ""

    def _is_settled(self, text: str) -> bool:
        """Whether no later token changes this text of the window."""
        return not text.endswith(_INCOMPLETE) and not self._ends_in_bytes()

    def _ends_in_bytes(self) -> bool:
        """Whether the last token with a text is a byte: a run of bytes is decoded as one, all of it or none."""
        for token_id in reversed(self._window):
            if _BYTE_PIECE.fullmatch(self._piece_of(token_id) or ""):
                return True
            if self._decode([token_id]):
                return False
        return False
