"""A calibration while a pair is loaded: few short prompts choose the draft's scoring heads, once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.search import Progress, calibrate
from spec_stack.engine.pair import ModelPair
from spec_stack.prefill.calibration import Calibration

QUICK = CalibrateConfig(lengths=(1024,), prompts=24)
"""What `experiments/LOG.md`, "Calibration at load", measured."""

logger = logging.getLogger(__name__)


def calibrate_heads(
    pair: ModelPair,
    config: CalibrateConfig = QUICK,
    *,
    documents: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Choose a draft's scoring heads, for any target; keep rates stay. Arguments and errors: see `calibrate`."""
    # So few prompts choose no keep rate.
    found = calibrate(pair, config, documents=documents, progress=progress, chooses_rates=False)
    settings = {name: value for name, value in found.settings.items() if name != "min_prompt_tokens"}
    return replace(found, settings=settings, target={})


def calibrate_at_load(pair: ModelPair, file: Path) -> Calibration:
    """`calibrate_heads`, saved to `file`, for the next load; the log says so."""
    logger.warning("this draft has no calibration: 24 short prompts find its scoring heads, once, for %s", file)
    found = calibrate_heads(pair)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.save(file)
    except OSError as error:
        logger.warning("the calibration could not be saved, and is found again at the next load: %s", error)
    logger.warning("calibrated in %.0f s: %s", found.seconds, found.notes[-1])
    return replace(found, origin=file.name)
