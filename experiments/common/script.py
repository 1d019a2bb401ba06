"""What scripts share: their options, their report, which is their last line, and how they end on bad input."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.common.environment import describe, note_pair
from spec_stack import SpecStackConfig, SpecStackGenerator
from spec_stack.config import LoadConfig


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A script's parser, its docstring shown as it is, with --out for `print_report`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON report (experiments/results/NAME.json)")
    return parser


def add_row_arguments(parser: argparse.ArgumentParser, limited: bool = True) -> None:
    """The options of every resumable script (`spec_stack.bench.rows`). limited: whether it takes as many prompts as
    there are."""
    parser.add_argument("--rows", type=Path, required=True, help="file of rows; a run goes on after those it holds")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no prompt after so many (no limit)")
    if limited:
        parser.add_argument("--limit", type=int, help="most prompts (default: all)")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every script that runs a draft/target pair through `load_generator`."""
    parser.add_argument("--target", help="target model (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--draft-precision", default=LoadConfig.draft_precision)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    parser.add_argument("--precision", default=LoadConfig.precision)


def load_generator(
    arguments: argparse.Namespace, config: SpecStackConfig | None = None, calibration: bool | None = False
) -> SpecStackGenerator:
    """The generator asked for, by the paper's rule unless a calibration is named, as in `from_pretrained`.

    Sets the number of torch threads.
    """
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.target, arguments.draft)
    return SpecStackGenerator.from_pretrained(
        arguments.target,
        arguments.draft,
        precision=arguments.precision,
        draft_precision=arguments.draft_precision,
        device=arguments.device,
        config=config,
        calibration=calibration,
    )


def print_report(experiment: str, report: dict[str, Any], out: Path | None) -> None:
    """One JSON line with date, commit, machine and pair; the file gets the same with line breaks. What is no number is
    null, as strict readers want it."""
    whole = json.dumps({"experiment": experiment, **describe(), **report})
    report = json.loads(whole, parse_constant=lambda name: None)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def run(main: Callable[[], None]) -> None:
    """Run a script's main. What a user can mend is raised as ValueError, OSError or ImportError."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
