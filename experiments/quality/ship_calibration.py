"""Makes a calibration that ships of one that was made: for any target, with no length from which prompts are pruned.

A calibration tries no window. Where `experiments.real.evidence` has shown on captures with one that it costs nothing
from some length on, --draft-window puts it in.

python -m experiments.quality.ship_calibration made.json spec_stack/assets/calibrations --name DRAFT
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from experiments.common import script
from spec_stack.cli.arguments import window
from spec_stack.prefill.calibration import Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("made", type=Path, help="file of `spec-stack calibrate`")
    parser.add_argument("folder", type=Path, help="of those that ship")
    parser.add_argument("--name", required=True, help="of the draft")
    parser.add_argument("--draft-window", type=window, metavar="[SHORTEST:]WINDOW", help="as of the configuration")
    arguments = parser.parse_args()
    made = Calibration.load(arguments.made)
    if not made.settings or not made.weights:
        raise ValueError(f"{arguments.made} chose nothing, or does not know the draft's weights; calibrate again")
    # The target decides from which length on a pruned prompt is sooner.
    settings = {name: value for name, value in made.settings.items() if name != "min_prompt_tokens"}
    if arguments.draft_window is not None:
        settings["draft_window"] = arguments.draft_window
    print(replace(made, settings=settings, target={}).save(arguments.folder / f"{arguments.name}.json"))


if __name__ == "__main__":
    script.run(main)
