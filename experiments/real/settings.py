"""What the scripts of a real pair compare with dense prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spec_stack import PrefillConfig
from spec_stack.prefill.calibration import Calibration


def calibrated(path: Path) -> PrefillConfig:
    """A calibration's rule without its window, which is a setting of its own."""
    return replace(Calibration.load(path).apply(), draft_window=None)


def settings_of(
    calibration: Path | None, rates: Sequence[float], windows: Sequence[int] = ()
) -> dict[str, PrefillConfig]:
    """Return the paper's rule, the default, and a calibration at these rates, with these windows too, by name."""
    default, paper = PrefillConfig(), PrefillConfig.full_look_ahead()
    found = {f"paper {paper.keep_rate}": paper, f"default {default.keep_rate}": default}
    if calibration:
        chosen = {f"calibrated {rate}": replace(calibrated(calibration), keep_rate=rate) for rate in rates}
        found |= chosen
        for window in windows:
            found |= {f"{name}, window {window}": replace(it, draft_window=window) for name, it in chosen.items()}
    return found
