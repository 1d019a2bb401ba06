"""What the scripts of a real pair compare with dense prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spec_stack import PrefillConfig
from spec_stack.prefill.calibration import Calibration


def settings_of(
    calibration: Path | None, rates: Sequence[float], windows: Sequence[int] = ()
) -> dict[str, PrefillConfig]:
    """Return the paper's rule, the default, and a calibration at these rates, with these windows too, by name.

    Windows are settings of their own: the calibration's is not applied.
    """
    default, paper = PrefillConfig(), PrefillConfig.full_look_ahead()
    found = {f"paper {paper.keep_rate}": paper, f"default {default.keep_rate}": default}
    if calibration:
        chosen = replace(Calibration.load(calibration).apply(), draft_window=None)
        calibrated = {f"calibrated {rate}": replace(chosen, keep_rate=rate) for rate in rates}
        found |= calibrated
        for window in windows:
            found |= {f"{name}, window {window}": replace(it, draft_window=window) for name, it in calibrated.items()}
    return found
