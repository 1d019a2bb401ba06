"""The text of each prompt token from its id: `Pieces(tokenizer).of(prompt_ids)`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from spec_stack.tokenizers.vocabulary import added_tokens, bytes_of_token, decoder_kinds


class Pieces:
    """Token texts by id, cached and shared by requests."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = decoder_kinds(tokenizer) if tokenizer.is_fast else set()
        self._bytes = {token_id: text.encode() for token_id, text in added_tokens(tokenizer).items()}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, (n,). A character that spans several tokens belongs to the last one."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(self.bytes_of(token_id)) for token_id in token_ids]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds mid-text; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            known = bytes_of_token(token, self._kinds)
            if known is None:
                known = self._decoded(token_id).encode()
            self._bytes[token_id] = known
        return known

    def _decoded(self, token_id: int) -> str:
        """The text of a token's second occurrence in a row: many decoders drop a text's first space."""
        once, twice = (str(self._tokenizer.decode([token_id] * count)) for count in (1, 2))
        return twice[len(once) :]
