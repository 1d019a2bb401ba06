"""Incremental detokenization; the increments concatenate to the decoded text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from spec_stack.decode.stopping import TextStream
from spec_stack.hf.prompt import special_tokens

_INCOMPLETE = "\ufffd"
# Prompt tokens used as decoding context for the first generated token.
_NUM_CONTEXT = 8
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def open_text_stream(tokenizer: Any, prompt_ids: Sequence[int], shown: Collection[str] = ()) -> TextStream | None:
    """The text stream after a prompt; None without a tokenizer. shown: special tokens that the text contains."""
    if tokenizer is None:
        return None
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if shown:
        hidden = {token_id for text, token_id in special_tokens(tokenizer).items() if text not in shown}
        decode = partial(_decode_without, tokenizer, hidden)
    return WindowedText(decode, prompt_ids[-_NUM_CONTEXT:], tokenizer.convert_ids_to_tokens)


def _decode_without(tokenizer: Any, hidden: Collection[int], token_ids: Sequence[int]) -> str:
    kept = [token_id for token_id in token_ids if token_id not in hidden]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class WindowedText:
    """Decodes the latest tokens behind those of the previous increment, so that a leading space is kept."""

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
