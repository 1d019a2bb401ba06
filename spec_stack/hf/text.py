"""Text of a growing list of token ids, in increments that concatenate to the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream

from spec_stack.decode.stopping import TextStream

_INCOMPLETE = "\ufffd"
# Tokens of the prompt that the first generated one is decoded after.
_NUM_CONTEXT = 8
# Tokens decoded anew with every increment: few enough to be cheap, many enough that they seldom need to be cut.
_LONGEST_WINDOW = 64


def open_text_stream(tokenizer: Any, prompt_ids: Sequence[int]) -> TextStream | None:
    """The stream for a text that goes on after a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None
    if tokenizer.is_fast:
        return ContinuedText(tokenizer.backend_tokenizer, prompt_ids)
    return WindowedText(partial(tokenizer.decode, skip_special_tokens=True), prompt_ids[-_NUM_CONTEXT:])


class ContinuedText:
    """By the `DecodeStream` of the tokenizers library, begun with the end of the prompt.

    A decoder may treat the beginning of a text apart: SentencePiece-style ones drop its first space, which belongs to a
    continuation all the same.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = list(prompt_ids[-_NUM_CONTEXT:])
        self._before = self._decode(context)
        if self._before.endswith(_INCOMPLETE):
            # Half a character, which the stream could not tell from a whole one.
            context, self._before = [], ""
        self._ids = context
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._num_pushed = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, as far as it is certain."""
        self._ids.extend(token_ids)
        text = "".join(self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids)
        self._num_pushed += len(text)
        return text

    def flush(self) -> str:
        """Return what was held back, as it stands."""
        return self._decode(self._ids)[len(self._before) + self._num_pushed :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class WindowedText:
    """By decoding the last tokens anew, for tokenizers that are no part of the tokenizers library.

    Parameters
    ----------
    decode : callable
        Maps token ids to text.
    context_ids : sequence of int
        The tokens that the text goes on after.
    """

    def __init__(self, decode: Callable[[list[int]], str], context_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context_ids)
        self._context_text = decode(self._window) if self._window else ""
        if self._context_text.endswith(_INCOMPLETE):
            self._window, self._context_text = [], ""
        self._context_len = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, as far as it is certain."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._context_text):
            return ""
        added = text[len(self._context_text) :]
        # The tokens just decoded become the context of the next ones: a piece's text can depend on its left neighbour.
        if len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[self._context_len :]
            text = self._decode(self._window)
        self._context_len = len(self._window)
        self._context_text = text
        return added

    def flush(self) -> str:
        """Return what was held back, as it stands."""
        return self._decode(self._window)[len(self._context_text) :]
