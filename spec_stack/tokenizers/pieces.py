"""The text of every token of a prompt, from its ids alone.

How it is used: `Pieces(tokenizer).of(prompt_ids)` gives the pieces that `prefill.units` cuts lines by, alike for a
text, a chat and bare ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from spec_stack.tokenizers.vocabulary import added_tokens, bytes_of_token, decoder_kinds


class Pieces:
    """Pieces of text by token id; shared by requests, which only fill its store.

    Parameters
    ----------
    tokenizer : object
        The target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = decoder_kinds(tokenizer) if tokenizer.is_fast else set()
        self._bytes = {token_id: text.encode() for token_id, text in added_tokens(tokenizer).items()}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, (n,).

        A character of several tokens stands at the last of them, and the others are empty.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(self._bytes_of(token_id)) for token_id in token_ids]

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            known = bytes_of_token(token, self._kinds)
            if known is None:
                known = str(self._tokenizer.decode([token_id])).encode()
            self._bytes[token_id] = known
        return known
