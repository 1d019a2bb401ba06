"""How two tokenizers are compared, and what a pair with padded logits or another tokenizer is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.hf.attention import install
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.model import CachedModel
from spec_stack.tokenizers.translation import Translation
from spec_stack.tokenizers.vocabulary import Pieces, by_bytes, compare
from tests.support import reference
from tests.support.models import byte_fallback_tokenizer, make_model, make_tokenizer, random_prompt
from tests.support.retokenize import drop_merges

LETTERS = "a b c d e f g h i j"


def words(names: str, decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; without a decoder nothing is known of its tokens but their names."""
    vocab = {name: index for index, name in enumerate(names.split())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece(tokens: str) -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(tokens.split())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_one_tokenizer_is_the_same_or_padded_by_the_width_of_the_logits() -> None:
    tokenizer = make_tokenizer(LETTERS)
    assert compare(tokenizer, make_tokenizer(LETTERS), 10, 10).relation == "same"
    assert compare(tokenizer, make_tokenizer(LETTERS), 12, 16).relation == "padded"
    assert compare(tokenizer, tokenizer, 16, 12).relation == "padded"


def test_added_tokens_do_not_make_another_tokenizer() -> None:
    longer = make_tokenizer(LETTERS)
    longer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    assert compare(make_tokenizer(LETTERS), longer, 16, 16).relation == "same"
    assert compare(make_tokenizer(LETTERS), make_tokenizer(LETTERS, "<s>"), 16, 16).relation == "other"


def test_without_a_drafts_tokenizer_equal_widths_are_trusted_and_others_refused() -> None:
    assert compare(None, None, 8, 8).relation == "same"
    with pytest.raises(ValueError, match="give tokenizer= and draft_tokenizer="):
        compare(make_tokenizer(LETTERS), None, 8, 9)
    with pytest.raises(ValueError, match="64 and 65 logits"):
        SpecStackGenerator(make_model(), make_model(vocab=65))


def test_tokenizers_without_offsets_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the draft's ByT5Tokenizer gives no character offsets"):
        compare(make_tokenizer(LETTERS), ByT5Tokenizer(), 16, 400)


def test_common_tokens_are_those_with_the_same_bytes_each_once() -> None:
    byte_level = make_tokenizer("Ġ t h Ġt e Ġth he Ã ©", "<s> <pad>")
    marked = sentence_piece("<0x74> <0xC3> ▁t t e ▁th ▁ é he")
    assert by_bytes(marked)[b" t"] == 2
    common = compare(byte_level, marked, 16, 16).common
    by_name = {byte_level.convert_ids_to_tokens(one): marked.convert_ids_to_tokens(two) for one, two in common.items()}
    expected = {"Ġ": "▁", "t": "t", "Ġt": "▁t", "e": "e", "Ġth": "▁th", "he": "he", "Ã": "<0xC3>"}
    assert by_name == expected
    assert len(set(common.values())) == len(common)


def test_special_tokens_pair_by_text_and_by_role() -> None:
    target, draft = make_tokenizer(LETTERS, "<s> <user>", bos=True), make_tokenizer("b a", "<user> <bos>", bos=True)
    draft.bos_token = "<bos>"
    common = compare(target, draft, 12, 4).common
    assert common == {0: 1, 1: 0, 2: 3, 3: 2}


def test_ids_without_a_row_of_logits_are_not_common() -> None:
    target, draft = make_tokenizer("a b c d"), make_tokenizer("d c b a")
    assert compare(target, draft, 4, 3).common == {1: 2, 2: 1, 3: 0}
    assert compare(target, draft, 2, 4).common == {0: 3, 1: 2}


def test_a_token_the_draft_lacks_is_read_as_its_longest_pieces() -> None:
    target = make_tokenizer("a b c ab abc Ã © Ġ d", "<x>")
    draft = make_tokenizer("Ġ © b a c ab Ã", "<y>")
    translation = Translation(target, draft, compare(target, draft, 16, 16))

    def pieces(token: str) -> list[str]:
        return draft.convert_ids_to_tokens(translation.pieces(target.convert_tokens_to_ids(token)))

    assert pieces("abc") == ["ab", "c"]
    assert pieces("Ã") == ["Ã"]
    # Nothing of it is known to the draft: a space.
    assert pieces("d") == pieces("<x>") == ["Ġ"]
    assert draft.convert_ids_to_tokens(translation.pieces(15)) == ["Ġ"]


def test_ids_that_only_one_of_a_padded_pair_has_are_cut_off_or_impossible() -> None:
    model = make_model()
    install(model)
    plain = CachedModel(model, 4096).forward([3, 63], [0, 1], 1)
    narrower = CachedModel(model, 4096, num_ids=70).forward([3, 69], [0, 1], 1)
    assert torch.equal(narrower[:, :64], plain)
    assert bool((narrower[:, 64:] == -torch.inf).all())
    assert narrower.shape == (1, 70)
    assert torch.equal(CachedModel(model, 4096, num_ids=50).forward([3, 63], [0, 1], 1), plain[:, :50])


@pytest.mark.parametrize("widths", [(64, 80), (80, 64), pytest.param((70, 66), marks=pytest.mark.nightly)])
def test_a_padded_pair_is_lossless_in_both_phases(widths: tuple[int, int]) -> None:
    """The target of random weights does say its padding ids; a narrower draft has to read them."""
    target, draft = make_model(seed=1, vocab=widths[0]), make_model(seed=1, vocab=widths[1])
    tokenizer = words(" ".join(f"w{index}" for index in range(64)).replace("w0 ", "a "))
    config = SpecStackConfig(PrefillConfig(chunk_size=8, granularity="chunks"))
    generator = SpecStackGenerator(target, draft, tokenizer, config=config, draft_tokenizer=tokenizer)
    assert generator.pair.vocabulary.relation == "padded"
    prompt = random_prompt(100, vocab=widths[0])
    dense = reference.greedy(target, prompt, 40)
    assert widths[0] <= widths[1] or max(prompt + dense) >= widths[1]
    for gamma in (1, 8):
        options = {"input_ids": prompt, "max_tokens": 40, "gamma": gamma}
        assert generator.generate(sparse_prefill="off", **options).token_ids == dense
        pruned = generator.generate(sparse_prefill="on", **options)
        assert pruned.token_ids == generator.generate(sparse_prefill="on", **options | {"gamma": 0}).token_ids
        assert pruned.metrics.sparse_prefill
        assert pruned.metrics.decode_reason.startswith("on: target and draft share a tokenizer; their logits differ")


def test_a_padded_draft_proposes_as_the_unpadded_one() -> None:
    target, draft = make_model(seed=1), make_model(seed=1)
    plain = SpecStackGenerator(target, draft).generate(input_ids=random_prompt(30), max_tokens=40, gamma=4)
    assert plain.metrics.acceptance_rate == 1.0
    padded = make_model(seed=1)
    padded.resize_token_embeddings(72)
    # Padding that would win every argmax, were it not cut off.
    padded.lm_head.weight.data[64:] = 10 * padded.lm_head.weight.data[:64].abs().max()
    tokenizer = make_tokenizer(LETTERS)
    wide = SpecStackGenerator(target, padded, tokenizer, draft_tokenizer=tokenizer)
    result = wide.generate(input_ids=random_prompt(30), max_tokens=40, gamma=4)
    assert (result.token_ids, result.metrics.acceptance_rate) == (plain.token_ids, 1.0)


def test_tokenizers_without_a_common_token_are_refused() -> None:
    with pytest.raises(ValueError, match="without a common token"):
        compare(words("a b c d e f g h"), words("x a b c d e f g h"), 8, 9)


def test_the_doctor_says_how_the_vocabularies_relate(folders: tuple[Path, Path]) -> None:
    def vocabulary() -> dict[str, str]:
        report = diagnose(str(folders[0]), str(folders[1]), "auto", "cpu")
        assert report["problem"] is None
        return report["vocabulary"]

    assert vocabulary()["tokenizer"] == "same"
    assert vocabulary()["drafting"] == "on: target and draft share a tokenizer"
    config = folders[1] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 4224}))
    weights = load_file(folders[1] / "model.safetensors")
    padded = {
        name: F.pad(weight, (0, 0, 0, 128)) if len(weight) == 4096 else weight for name, weight in weights.items()
    }
    save_file(padded, folders[1] / "model.safetensors", {"format": "pt"})
    assert vocabulary()["tokenizer"] == "padded"
    assert "4096 and 4224" in vocabulary()["drafting"]
    drop_merges(ASSETS / "draft", folders[1], 0.1, seed=0, tokenizer_from=ASSETS / "target")
    other = vocabulary()
    assert (other["tokenizer"], other["common_tokens"]) == ("other", "3104 of 4096 (76%)")
    assert "mapped to the target's by characters" in other["sparse_prefill"]
    assert other["drafting"].startswith("on: other tokenizer; the draft proposes the 3104 tokens (76% of the target's)")


STRIPPING = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (words("▁be be ▁ .", STRIPPING), [b" be", b"be", b" ", b"."]),
        (words("▁be be ▁ .", decoders.Metaspace()), [b" be", b"be", b" ", b"."]),
        (words("be ##ing", decoders.WordPiece()), [b" be", b"ing"]),
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
