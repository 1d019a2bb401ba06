"""Does calibration choose otherwise for another draft, and does it say where a draft cannot retrieve?

Three drafts of the embedded target: the embedded one, the same with another tokenizer (`retokenize`: its words are cut
otherwise than those it was trained on), and one of its shape with random weights. Prints what was chosen for each, and
why; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.quality.retokenize import drop_merges
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.report import format_calibration
from spec_stack.calibrate.search import calibrate
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS


def with_random_weights(pair: ModelPair) -> ModelPair:
    """The same target with a draft that has learnt nothing."""
    torch.manual_seed(0)
    # A copy: the draft looks up its attention in its own configuration.
    config = deepcopy(pair.draft.config)
    blind = type(pair.draft)._from_config(config, attn_implementation="sdpa").eval().to(pair.draft.device)
    return ModelPair.assemble(pair.target, blind, pair.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=CalibrateConfig.prompts, help="(%(default)s)")
    parser.add_argument("--merges-dropped", type=float, default=0.1, help="share, of the other tokenizer (%(default)s)")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1)
    add_out_argument(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    own = ModelPair.load(device=arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        drop_merges(ASSETS / "draft", Path(folder), arguments.merges_dropped, 0, tokenizer_from=ASSETS / "target")
        pairs = {
            "embedded": own,
            "with another tokenizer": ModelPair.load(ASSETS / "target", folder, device=arguments.device),
            "of random weights": with_random_weights(own),
        }
    rows: dict[str, Any] = {}
    for name, pair in pairs.items():
        found = calibrate(pair, lengths=arguments.lengths, prompts_per_length=arguments.prompts)
        print(f"draft {name}, {found.seconds:.0f} s\n{format_calibration(found)}\n", flush=True)
        rows[name] = {
            "settings": found.settings,
            "kinds": found.kinds,
            "head_recall": found.head_recall,
            "notes": found.notes,
            "seconds": found.seconds,
        }
    print_report({"experiment": "calibrate_drafts", **describe(), "drafts": rows}, arguments.out)


if __name__ == "__main__":
    run_script(main)
