"""A calibration that ships is matched by what the draft is, and holds unless it is turned off or set beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.hf.architectures import text_config
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill import shipped
from spec_stack.prefill.calibration import Calibration, fingerprint
from spec_stack.sglang.server_args import ServerConfig, with_calibration
from tests.support.folders import copy_draft

SETTINGS: dict[str, Any] = {
    "keep_rate": 0.1,
    "scoring_heads": ((1, 1),),
    "head_reduction": "mean",
    "scoring_queries": "prompt",
}


@pytest.fixture(scope="module")
def plain() -> SpecStackGenerator:
    return SpecStackGenerator.from_pretrained(device="cpu", calibration=False)


@pytest.fixture
def known(plain: SpecStackGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The embedded draft without its own calibration, for which another one ships."""
    copy_draft(tmp_path / "draft")
    draft = plain.pair.draft
    weights = shipped.sketch(draft.get_input_embeddings().weight)
    (tmp_path / "shipped").mkdir()
    of_draft = fingerprint(text_config(draft.config))
    Calibration(SETTINGS, {}, of_draft, margin=0.1, weights=weights).save(tmp_path / "shipped" / "tiny.json")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    shipped.shipped.cache_clear()
    yield ASSETS / "target", tmp_path / "draft"  # type: ignore[misc]
    shipped.shipped.cache_clear()


def embedding(seed: int = 0) -> torch.Tensor:
    return torch.randn(1000, 64, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sketch_is_of_the_same_weights_whatever_their_dtype_and_of_no_others(dtype: torch.dtype) -> None:
    made = shipped.sketch(embedding().to(dtype))
    assert shipped.is_same(shipped.sketch(embedding()), made)
    assert not shipped.is_same(shipped.sketch(embedding(1)), made)
    assert not shipped.is_same((), made)
    assert not shipped.is_same((), ())
    assert not shipped.is_same(shipped.sketch(torch.zeros(1000, 64)), made)
    assert shipped.sketch(torch.zeros(1000, 64, device="meta")) == ()


def test_weights_that_were_packed_into_eight_or_four_bits_are_the_same() -> None:
    weights = embedding()
    for bits in (8, 4):
        scale = weights.unflatten(1, (2, 32)).abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
        packed = ((weights.unflatten(1, (2, 32)) / scale).round() * scale).flatten(1)
        assert shipped.is_same(shipped.sketch(weights), shipped.sketch(packed)), bits


def test_files_give_the_sketch_of_the_loaded_draft(plain: SpecStackGenerator, tmp_path: Path) -> None:
    loaded = shipped.sketch(plain.pair.draft.get_input_embeddings().weight)
    assert shipped.sketch_of_files(ASSETS / "draft") == loaded
    assert shipped.sketch_of_files(tmp_path) == ()
    assert shipped.sketch_of_files("nobody/such-a-draft") == ()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert shipped.sketch_of_files(tmp_path) == ()


def test_it_is_matched_told_and_can_be_turned_off(known: tuple[Path, Path]) -> None:
    generator = SpecStackGenerator.from_pretrained(*known, device="cpu")
    assert generator.config.prefill == PrefillConfig(**SETTINGS)
    result = generator.generate("A line of text.\n" * 200, max_tokens=1, sparse_prefill="on")
    assert result.metrics.sparse_prefill_reason == 'on: sparse_prefill="on"; calibrated by what ships for tiny'
    off = SpecStackGenerator.from_pretrained(*known, device="cpu", calibration=False)
    assert off.config.prefill == PrefillConfig()
    assert diagnose(*map(str, known), "auto", "cpu")["calibration"].startswith("what ships for tiny: ")


def test_a_calibration_beside_the_draft_or_named_comes_first(known: tuple[Path, Path], tmp_path: Path) -> None:
    made = shipped.shipped()[0]
    named = replace(made, settings={"keep_rate": 0.3}).save(tmp_path / "named.json")
    assert SpecStackGenerator.from_pretrained(*known, device="cpu", calibration=named).config.prefill.keep_rate == 0.3
    replace(made, settings={"keep_rate": 0.4}).save(known[1])
    assert SpecStackGenerator.from_pretrained(*known, device="cpu").config.prefill.keep_rate == 0.4


def test_other_weights_of_the_same_shape_are_not_matched(known: tuple[Path, Path], plain: SpecStackGenerator) -> None:
    weight = plain.pair.draft.get_input_embeddings().weight
    for model, values, is_matched in (
        (plain.pair.draft, weight, True),
        (plain.pair.draft, torch.randn_like(weight), False),
        (plain.pair.target, weight, False),
    ):
        found = shipped.find_shipped(text_config(model.config), shipped.sketch(values))
        assert (found is not None) is is_matched


def test_a_server_takes_it_too(known: tuple[Path, Path], plain: SpecStackGenerator) -> None:
    configs = [text_config(model.config) for model in (plain.pair.target, plain.pair.draft)]
    on_server = with_calibration(ServerConfig(), str(known[1]), *configs).prefill
    assert on_server == PrefillConfig(**SETTINGS, positions="contiguous")
    own = ServerConfig(PrefillConfig(head_reduction="max"))
    assert with_calibration(own, str(known[1]), *configs).prefill.head_reduction == "max"
    none = ServerConfig(calibration="none")
    assert with_calibration(none, str(known[1]), *configs) == none


def test_every_calibration_that_ships_can_be_taken_and_names_no_target() -> None:
    shipped.shipped.cache_clear()
    for each in shipped.shipped():
        assert each.target == {}
        assert "min_prompt_tokens" not in each.settings
        assert len(each.weights) == 256
        assert each.apply().scoring_heads or each.apply().scorer == "bm25"


def test_a_file_of_something_else_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="for a calibration: it has no 'version'"):
        Calibration.load(tmp_path / "other.json")
