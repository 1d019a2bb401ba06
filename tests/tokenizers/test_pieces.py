"""The bytes of a token are those that it adds to a text, whatever the decoder does at the beginning of one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from spec_stack.tokenizers.vocabulary import Pieces
from tests.support.models import byte_fallback_tokenizer, make_tokenizer


def of_words(words: str, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(words.split())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


STRIPPING = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (of_words("▁be be ▁ .", STRIPPING), [b" be", b"be", b" ", b"."]),
        (of_words("▁be be ▁ .", decoders.Metaspace()), [b" be", b"be", b" ", b"."]),
        (of_words("be ##ing", decoders.WordPiece()), [b" be", b"ing"]),
        (make_tokenizer("Ġ b e be Ġbe â Ĥ âĤ", "<|end|>"), [b"<|end|>", b" ", b"b", b"e", b"be", b" be"]),
    ],
    ids=["strip", "metaspace", "wordpiece", "bytelevel"],
)
def test_a_token_has_the_bytes_that_it_adds(tokenizer: PreTrainedTokenizerFast, expected: list[bytes]) -> None:
    pieces = Pieces(tokenizer)
    assert [pieces.bytes_of(token_id) for token_id in range(len(expected))] == expected


def test_half_a_character_has_its_own_bytes_and_no_token_has_none() -> None:
    tokenizer = byte_fallback_tokenizer("▁be be 日")
    pieces = Pieces(tokenizer)
    names = ["<0xE2>", "<0x0A>", "▁be", "be", "日", "</s>"]
    spelled = [pieces.bytes_of(token_id) for token_id in tokenizer.convert_tokens_to_ids(names)]
    assert spelled == [b"\xe2", b"\n", b" be", b"be", "日".encode(), b"</s>"]
    assert pieces.bytes_of(len(tokenizer) + 5) == b""
