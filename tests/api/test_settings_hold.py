"""What a user sets holds beside a calibration, also where it equals the default."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from spec_stack import PrefillConfig, Pruner, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.arguments import build_parser, config_of
from spec_stack.hf.architectures import text_config
from spec_stack.prefill.calibration import CHOSEN, Calibration, fingerprint

# None of them is a default.
CALIBRATED: dict[str, Any] = {
    "keep_rate": ((1000, 0.3), (8000, 0.05)),
    "look_ahead": 3,
    "min_prompt_tokens": 777,
    "draft_window": (5000, 99),
    "draft_sinks": 7,
    "scoring_heads": ((0, 0),),
    "scorer": "bm25",
    "granularity": "chunks",
    "scoring_queries": "look_ahead",
    "first_scoring_layer": 1,
    "head_reduction": "max",
    "max_dropped_attention": 0.3,
}
CALIBRATION = Calibration(CALIBRATED, {}, {}, margin=0.1)
DEFAULT = PrefillConfig()


@pytest.mark.parametrize("name", CHOSEN)
def test_a_field_holds_wherever_it_is_set_and_no_other(name: str) -> None:
    value, others = getattr(DEFAULT, name), set(CHOSEN) - {name}
    changed = replace(replace(DEFAULT, prefill_chunk=512), **{name: value})
    assert set(changed.given) == {name, "prefill_chunk"}
    flag = build_parser().parse_args(["generate", "x", f"--{name.replace('_', '-')}", str(value).lower()])
    for given in (PrefillConfig(**{name: value}), changed, config_of(PrefillConfig, flag)):
        completed = CALIBRATION.complete(given)
        assert getattr(completed, name) == value != CALIBRATED[name]
        assert all(getattr(completed, other) == CALIBRATED[other] for other in others)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("draft_window", "512", 512),
        ("draft_window", "8192:512", (8192, 512)),
        ("draft_window", "none", None),
        ("scoring_heads", "13.0,13.13", ((13, 0), (13, 13))),
    ],
)
def test_values_that_are_no_number_have_a_form_of_their_own(flag: str, text: str, value: object) -> None:
    arguments = build_parser().parse_args(["generate", "x", f"--{flag.replace('_', '-')}", text])
    assert getattr(config_of(PrefillConfig, arguments), flag) == value


@pytest.mark.parametrize("variant", [PrefillConfig.raw, PrefillConfig.full, PrefillConfig.full_look_ahead])
def test_the_papers_variants_can_be_asked_for(variant: Any) -> None:
    config = variant()
    assert all(
        getattr(CALIBRATION.complete(config), name) == getattr(config, name)
        for name in CHOSEN
        if name != "min_prompt_tokens"
    )


def test_what_was_given_is_no_part_of_what_a_configuration_is() -> None:
    assert PrefillConfig(keep_rate=DEFAULT.keep_rate) == DEFAULT
    assert "given" not in repr(PrefillConfig(keep_rate=0.2))
    assert fields(PrefillConfig)[0].name == "given"  # `remembers_given` counts on it


def test_a_keep_rate_of_the_configuration_and_of_a_call_hold_beside_a_calibration(tmp_path: Path) -> None:
    models = SpecStackGenerator.from_pretrained(calibration=False).pair
    shapes = {role: fingerprint(text_config(getattr(models, role).config)) for role in ("target", "draft")}
    file = Calibration({"keep_rate": 0.05}, **shapes, margin=0.1).save(tmp_path)
    prompt = list(range(100, 1100))
    kept = {}
    for rate in (None, DEFAULT.keep_rate):
        prefill = PrefillConfig() if rate is None else PrefillConfig(keep_rate=rate)
        generator = SpecStackGenerator.from_pretrained(config=SpecStackConfig(prefill=prefill), calibration=file)
        result = generator.generate(input_ids=prompt, max_tokens=1, sparse_prefill="on")
        kept[rate] = result.metrics.num_kept_tokens
        called = generator.generate(input_ids=prompt, max_tokens=1, sparse_prefill="on", keep_rate=DEFAULT.keep_rate)
        assert called.metrics.num_kept_tokens == pytest.approx(200, abs=32)
    assert kept[None] < 150
    assert kept[DEFAULT.keep_rate] == pytest.approx(200, abs=32)


def test_the_embedded_pair_prunes_by_its_first_layer_alone() -> None:
    config = SpecStackConfig(PrefillConfig(scoring_heads=((0, 0), (0, 1)), on_scoring_failure="raise"))
    generator = SpecStackGenerator.from_pretrained(config=config)
    result = generator.generate(input_ids=list(range(100, 1100)), max_tokens=1, sparse_prefill="on")
    assert result.metrics.sparse_prefill


@pytest.mark.parametrize("heads", [((99, 0),), ((0, 0), (0, 99))], ids=str)
def test_heads_that_the_draft_does_not_have_are_refused(heads: tuple[tuple[int, int], ...]) -> None:
    prefill = PrefillConfig(scoring_heads=heads)
    with pytest.raises(ValueError, match=r"scoring_heads names \[\(\d+, \d+\)\]; the draft has \d layers of \d heads"):
        SpecStackGenerator.from_pretrained(config=SpecStackConfig(prefill))
    with pytest.raises(ValueError, match=r"scoring_heads names"):
        Pruner.from_pretrained(config=prefill)
