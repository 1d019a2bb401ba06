"""The texts of tokens, and the relation of draft ids to target ids: same tokenizer, padded logits, or another one."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.convert_slow_tokenizer import bytes_to_unicode

Relation = Literal["same", "padded", "other"]
_BYTES = {character: value for value, character in bytes_to_unicode().items()}
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """A pair's vocabularies: logits widths, the size of the target's tokenizer, and the target id → draft id of tokens
    with equal text, one-to-one; only for different tokenizers."""

    relation: Relation
    num_target: int
    num_draft: int
    num_tokens: int = 0
    common: Mapping[int, int] = field(default_factory=dict)

    @property
    def prefill_note(self) -> str:
        if self.relation != "other":
            return "the draft scores the target's tokens"
        return "the draft scores the prompt in its own tokens, mapped to the target's by characters"

    @property
    def decode_reason(self) -> str:
        """How the draft's tokens relate to the target's."""
        if self.relation == "same":
            return "on: target and draft share a tokenizer"
        if self.relation == "padded":
            return (
                "on: target and draft share a tokenizer; their logits differ in width "
                f"({self.num_target} and {self.num_draft}), and ids that only one of them has are never proposed"
            )
        return (
            f"on: other tokenizer; the draft proposes the {len(self.common)} tokens "
            f"({len(self.common) / self.num_tokens:.0%} of the target's) that both have"
        )


def compare(target: Any, draft: Any, num_target: int, num_draft: int) -> Vocabulary:
    """Classify a pair by its tokenizers, which are equal up to added tokens, and logits widths. Raises ValueError for
    different widths without tokenizers, and for different tokenizers without character offsets or common tokens."""
    if target is None or draft is None:
        if num_target != num_draft:
            raise ValueError(
                f"target and draft have {num_target} and {num_draft} logits; give tokenizer= and draft_tokenizer=, so "
                "that their vocabularies can be compared"
            )
        return Vocabulary("same", num_target, num_draft)
    num_tokens = len(target)
    if target is draft or _ordinary(target) == _ordinary(draft):
        return Vocabulary("same" if num_target == num_draft else "padded", num_target, num_draft, num_tokens)
    for role, tokenizer in (("target", target), ("draft", draft)):
        if not tokenizer.is_fast:
            raise ValueError(
                f"target and draft have different tokenizers, and the {role}'s {type(tokenizer).__name__} gives no "
                "character offsets to map one to the other; use a draft of the target's family"
            )
    common = {
        target_id: draft_id
        for target_id, draft_id in _common(target, draft).items()
        if target_id < num_target and draft_id < num_draft
    }
    if not common:
        raise ValueError("target and draft have different tokenizers without a common token; use another draft")
    return Vocabulary("other", num_target, num_draft, num_tokens, common)


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Id → text of the added tokens, mostly special ones."""
    return {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}


def _ordinary(tokenizer: Any) -> dict[str, int]:
    """Token → id without the added tokens."""
    added = set(added_tokens(tokenizer).values())
    return {token: token_id for token, token_id in tokenizer.get_vocab().items() if token not in added}


def bytes_of_token(token: str, kinds: Collection[str]) -> bytes | None:
    """Bytes of an ordinary token under these decoder types; None if unknown."""
    if "ByteLevel" in kinds:
        return bytes(_BYTES[character] for character in token) if all(map(_BYTES.__contains__, token)) else None
    if not {"Metaspace", "ByteFallback"}.isdisjoint(kinds):
        match = _BYTE_PIECE.fullmatch(token)
        return bytes.fromhex(match[1]) if match else token.replace("\u2581", " ").encode()
    return None


def decoder_kinds(tokenizer: Any) -> set[str]:
    """Types of a fast tokenizer's decoders, sequences flattened."""
    decoder = tokenizer.backend_tokenizer.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return {part["type"] for part in state.get("decoders", [state]) if part}


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


def by_bytes(tokenizer: Any) -> dict[bytes, int]:
    """Bytes → id of a fast tokenizer's ordinary tokens, where known; byte tokens where there is no other."""
    kinds, ordinary = decoder_kinds(tokenizer), _ordinary(tokenizer)
    found = {}
    for token in sorted(ordinary, key=lambda token: not _BYTE_PIECE.fullmatch(token)):
        if text := bytes_of_token(token, kinds):
            found[text] = ordinary[token]
    return found


def special_pairs(target: Any, draft: Any) -> dict[int, int]:
    """Target id → draft id of added tokens with equal text, and of BOS and EOS tokens."""
    by_text = {text: token_id for token_id, text in added_tokens(draft).items()}
    pairs = {token_id: by_text[text] for token_id, text in added_tokens(target).items() if text in by_text}
    for role in ("bos_token_id", "eos_token_id"):
        target_id, draft_id = getattr(target, role), getattr(draft, role)
        if target_id is not None and draft_id is not None and draft_id not in pairs.values():
            pairs.setdefault(target_id, draft_id)
    return pairs


def _common(target: Any, draft: Any) -> dict[int, int]:
    draft_ids, target_ids = by_bytes(draft), by_bytes(target)
    ordinary = {target_id: draft_ids[text] for text, target_id in target_ids.items() if text in draft_ids}
    # Special tokens alone are no useful proposals.
    return ordinary | special_pairs(target, draft) if ordinary else {}
