from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from spec_stack import SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS, resolve_pair
from tests.hf.gguf_files import make_qwen2, set_first_type, write_gguf

pytest.importorskip("transformers.integrations.gguf", reason="this transformers reads no GGUF headers")
TOKENIZER = ASSETS / "target" / "tokenizer.json"
VOCAB = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, PreTrainedModel]:
    """A target and a draft as GGUF files, and the target's weights unpacked by hand."""
    folder = tmp_path_factory.mktemp("gguf")
    unpacked = write_gguf(make_qwen2(VOCAB), folder / "target.gguf", TOKENIZER)
    write_gguf(make_qwen2(VOCAB, seed=1), folder / "draft.gguf", TOKENIZER)
    return folder / "target.gguf", folder / "draft.gguf", unpacked


@pytest.fixture(scope="module")
def generator(files: tuple[Path, Path, PreTrainedModel]) -> SpecStackGenerator:
    return SpecStackGenerator.from_pretrained(*files[:2], device="cpu", prepack_linears=False)


def test_the_weights_of_a_file_are_those_unpacked_by_hand(
    files: tuple[Path, Path, PreTrainedModel], generator: SpecStackGenerator
) -> None:
    weights = generator.target.state_dict()
    expected = files[2].state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6, msg=name)
    assert (generator.pair.precision, generator.pair.draft_precision) == ("fp32", "fp32")


def test_greedy_tokens_of_a_file_are_those_of_its_weights_with_and_without_speculation(
    files: tuple[Path, Path, PreTrainedModel], generator: SpecStackGenerator
) -> None:
    ids = list(range(40, 90))
    made = files[2].generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    for gamma in (0, 3):
        result = generator.generate(input_ids=ids, max_tokens=20, gamma=gamma, ignore_eos=True)
        assert result.token_ids == made[0, len(ids) :].tolist()


def test_a_file_brings_its_tokenizer_or_takes_the_one_beside_it(
    files: tuple[Path, Path, PreTrainedModel], generator: SpecStackGenerator, tmp_path: Path
) -> None:
    text = "def read_lines(path):\n    return [line.strip() for line in open(path)]"
    assert generator.pair.vocabulary.relation == "same"
    assert generator.tokenizer.decode(generator.tokenizer(text).input_ids) == text
    shutil.copytree(ASSETS / "target", tmp_path / "both", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    shutil.copy(files[0], tmp_path / "both" / "model.gguf")
    pair = ModelPair.load(tmp_path / "both" / "model.gguf", tmp_path / "both" / "model.gguf", device="cpu")
    expected = AutoTokenizer.from_pretrained(ASSETS / "target")
    assert pair.tokenizer(text).input_ids == expected(text).input_ids
    assert pair.tokenizer.chat_template


def test_a_model_from_a_file_is_saved_as_one_of_plain_weights(generator: SpecStackGenerator, tmp_path: Path) -> None:
    generator.target.save_pretrained(tmp_path)
    generator.tokenizer.save_pretrained(tmp_path)
    again = SpecStackGenerator.from_pretrained(tmp_path, tmp_path, device="cpu", prepack_linears=False)
    ids = list(range(10, 60))
    first, second = (each.generate(input_ids=ids, max_tokens=10).token_ids for each in (generator, again))
    assert first == second


def test_a_file_is_named_by_its_path_or_beside_its_folder_also_on_the_hub(
    files: tuple[Path, Path, PreTrainedModel],
) -> None:
    folder = files[0].parent
    assert resolve_pair(folder / "target.gguf", files[1]) == (str(files[0]), str(files[1]))
    hub = ("owner/big/q4.gguf", "owner/small/sub/q8.gguf")
    assert resolve_pair(*hub) == hub


def test_what_cannot_be_read_is_refused_with_the_reason(
    files: tuple[Path, Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd.gguf"
    shutil.copy(files[0], odd)
    set_first_type(odd, 99)
    with pytest.raises(ValueError, match=r"99.* is not a valid GGMLQuantizationType"):
        ModelPair.load(odd, files[1], device="cpu")
    (tmp_path / "text.gguf").write_text("no model at all, but long enough to hold a header")
    with pytest.raises(ValueError, match="magic bytes"):
        ModelPair.load(tmp_path / "text.gguf", files[1], device="cpu")
    with pytest.raises(ValueError, match="is a GGUF file, which loads in bf16 or fp32"):
        ModelPair.load(*files[:2], precision="int8", device="cpu")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs gguf: .*\[gguf\]"):
        ModelPair.load(*files[:2], device="cpu")


@pytest.mark.parametrize("num_bytes", [0, 3, 5, 20, 30, 100, 400, 50_000])
def test_a_file_that_is_cut_off_in_its_header_is_refused(
    files: tuple[Path, Path, PreTrainedModel], tmp_path: Path, num_bytes: int
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[0].read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"cannot read the model configuration of .*cut.gguf"):
        ModelPair.load(cut, files[1], device="cpu")
    assert "cannot read the model configuration" in diagnose(str(cut), str(files[1]), "auto", "cpu")["problem"]


def test_the_doctor_takes_files(files: tuple[Path, Path, PreTrainedModel]) -> None:
    report = diagnose(str(files[0]), str(files[1]), "auto", "cpu")
    assert report["problem"] is None
    assert report["target"]["precision"] == "fp32"
    assert report["vocabulary"]["tokenizer"] == "same"
