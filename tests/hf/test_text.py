"""Streamed text is the text of the whole, whatever the tokens, the steps and the decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spec_stack import SpecStackGenerator
from spec_stack.decode.stopping import StopChecker, TextStream
from spec_stack.hf.prompt import open_text_stream
from tests.support.models import byte_fallback_tokenizer


def stream_of(tokenizer: Any, prompt: Sequence[int] = ()) -> TextStream:
    stream = open_text_stream(tokenizer, prompt)
    assert stream is not None
    return stream


def joined(stream: TextStream, token_ids: list[int], sizes: list[int]) -> tuple[str, list[str]]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(stream.push(token_ids[at : at + size]))
        at += size
    pieces.append(stream.push(token_ids[at:]))
    return "".join(pieces) + stream.flush(), pieces


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_stream_to_their_text_after_any_prompt(embedded: SpecStackGenerator, seed: int) -> None:
    """Bytes in any order: half characters, special tokens, and prompts that end within a character."""
    rng = random.Random(seed)
    prompt, token_ids = ([rng.randrange(embedded.pair.vocab_size) for _ in range(n)] for n in (rng.randrange(12), 60))
    result, _ = joined(stream_of(embedded.tokenizer, prompt), token_ids, [rng.randint(1, 5) for _ in range(30)])
    context = prompt[-8:]
    before = embedded.tokenizer.decode(context, skip_special_tokens=True)
    if before.endswith("\ufffd"):
        context, before = [], ""
    assert result == embedded.tokenizer.decode(context + token_ids, skip_special_tokens=True)[len(before) :]


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_random_ids_of_a_byte_fallback_tokenizer_stream_to_their_text(seed: int, strips: bool) -> None:
    """A run of bytes is one text, or where it is none, broken characters from its first byte on."""
    tokenizer, rng = byte_fallback_tokenizer("▁ ▁be be ▁The é 日 .", strips), random.Random(seed)
    likely = [*tokenizer.convert_tokens_to_ids([f"<0x{byte}>" for byte in ("0A", "E2", "82", "AC", "41", "20")]), 1]
    for _ in range(30):
        rows = [rng.choice([rng.randrange(len(tokenizer)), rng.choice(likely)]) for _ in range(20)]
        result, _ = joined(stream_of(tokenizer), rows, [rng.randint(1, 5) for _ in range(8)])
        assert result == tokenizer.decode(rows, skip_special_tokens=True)
        # After a prompt that ends in a word, the text is what the words of both have more than the prompt's.
        prompt = tokenizer.convert_tokens_to_ids(["▁The", "▁be"])
        result, _ = joined(stream_of(tokenizer, prompt), rows, [])
        assert tokenizer.decode(prompt) + result == tokenizer.decode([*prompt, *rows], skip_special_tokens=True)


def test_a_continuation_of_a_line_break_of_bytes_keeps_its_first_space() -> None:
    tokenizer = byte_fallback_tokenizer("▁be ▁The")
    prompt, ids = (tokenizer.convert_tokens_to_ids(tokens) for tokens in (["▁The", "<0x0A>"], ["▁be", "<0x0A>"]))
    assert joined(stream_of(tokenizer, prompt), ids, [1])[0] == " be\n"


def test_a_stop_string_of_bytes_ends_the_text_at_its_last_token() -> None:
    tokenizer = byte_fallback_tokenizer("▁be")
    ids = tokenizer.convert_tokens_to_ids(["▁be", "<0x0A>", "▁be"])
    for steps in ([ids], [ids[:1], ids[1:2], ids[2:]], [ids[:2], ids[2:]]):
        stopper, kept, text, reason = StopChecker(9, (), ["\n"], stream_of(tokenizer)), [], "", None
        while reason is None:
            more, piece, reason = stopper.cut(steps.pop(0))
            kept, text = kept + more, text + piece
        assert (kept, text, reason) == (ids[:2], "be", "stop")


def test_half_a_character_comes_out_at_the_end(embedded: SpecStackGenerator) -> None:
    ids = embedded.tokenizer("x\U0001f9ea", add_special_tokens=False).input_ids[:-1]
    for stop in ((), ("zz",)):
        text = StopChecker(len(ids), (), stop, stream_of(embedded.tokenizer)).cut(ids)[1]
        assert text == embedded.tokenizer.decode(ids)
        assert text.endswith("\ufffd")


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert open_text_stream(None, [1]) is None


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder drops the first space of what it is given, as Llama 2's and Mistral's do."""
    words = ["▁The", "▁quick", "▁brown", "▁fox", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_continuation_keeps_its_first_space(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    tokenizer = sentencepiece_like()
    generator = SpecStackGenerator(target, draft, tokenizer)
    result = generator.generate("The quick", max_tokens=2, logit_bias={2: 1000.0, 3: 900.0}, bad_words_ids=[[2, 2]])
    assert result.token_ids == [2, 3]
    assert result.text == " brown fox"
    windowed = TextStream(tokenizer.decode, [0, 1])
    assert windowed.push([2]) + windowed.push([3]) + windowed.flush() == " brown fox"
