"""A server takes what was calibrated for its pair, but for what SGLang's forwards cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from spec_stack.config import PrefillConfig
from spec_stack.prefill.calibration import FILE_NAME, Calibration, fingerprint
from spec_stack.sglang.server_args import ServerConfig, with_calibration


@pytest.fixture
def calibrated_draft(tmp_path: Path) -> tuple[Path, Any, Any]:
    target, draft = LlamaConfig(hidden_size=64), LlamaConfig(hidden_size=32)
    settings = {
        "keep_rate": ((2048, 0.1),),
        "draft_window": 64,
        "scoring_heads": ((1, 0),),
        "scorer": "bm25",
        "min_prompt_tokens": 700,
    }
    Calibration(settings, fingerprint(target), fingerprint(draft), margin=0.1).save(tmp_path)
    return tmp_path, target, draft


def test_a_server_takes_the_calibration_beside_the_draft(
    calibrated_draft: tuple[Path, Any, Any],
) -> None:
    folder, *models = calibrated_draft
    prefill = with_calibration(ServerConfig(), str(folder), *models).prefill
    assert prefill == PrefillConfig(
        keep_rate=((2048, 0.1),),
        scoring_heads=((1, 0),),
        scorer="bm25",
        min_prompt_tokens=700,
        positions="contiguous",
    )
    # By this a launch leaves the length as it is.
    assert "min_prompt_tokens" in prefill.given
    own = ServerConfig.from_mapping({"keep_rate": 0.4, "calibration": str(folder / FILE_NAME)})
    assert with_calibration(own, "elsewhere", *models).prefill.keep_rate == 0.4
    assert with_calibration(own, "elsewhere", *models).prefill.scorer == "bm25"
    none = ServerConfig(calibration="none")
    assert with_calibration(none, str(folder), *models) == none
    assert with_calibration(ServerConfig(), "a/hub-id", *models) == ServerConfig()


def test_a_calibration_of_other_models_is_refused_where_named_and_left_aside_where_found(
    calibrated_draft: tuple[Path, Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _, draft = calibrated_draft
    config = ServerConfig(PrefillConfig(min_prompt_tokens=2048))
    assert with_calibration(config, str(folder), draft, draft) == config
    assert "left aside" in caplog.text
    with pytest.raises(ValueError, match="another target"):
        with_calibration(ServerConfig(calibration=str(folder)), "", draft, draft)


def test_a_calibrated_check_takes_all_of_the_drafts_layers(calibrated_draft: tuple[Path, Any, Any]) -> None:
    folder, *models = calibrated_draft
    made = Calibration.load(folder)
    Calibration({**made.settings, "max_dropped_attention": 0.1}, made.target, made.draft, margin=0.1).save(folder)
    completed = with_calibration(ServerConfig(), str(folder), *models)
    assert (completed.prefill.max_dropped_attention, completed.num_draft_layers) == (0.1, None)
    own = with_calibration(ServerConfig(PrefillConfig(max_dropped_attention=0.3)), str(folder), *models)
    assert own.prefill.max_dropped_attention == 0.3
