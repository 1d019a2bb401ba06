"""The options by which every script takes a draft/target pair."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from experiments.common.environment import note_pair
from spec_stack import SpecStackConfig, SpecStackGenerator
from spec_stack.config import LoadConfig


def add_model_arguments(parser: argparse.ArgumentParser, threads: int = 1) -> None:
    """All but the target's precision, for scripts that go through several."""
    parser.add_argument("--target", help="target model (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--draft-precision", default=LoadConfig.draft_precision)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=threads, help="torch threads (%(default)s)")


def add_pair_arguments(parser: argparse.ArgumentParser, threads: int = 1) -> None:
    add_model_arguments(parser, threads)
    parser.add_argument("--precision", default=LoadConfig.precision)


def load_generator(
    arguments: argparse.Namespace, config: SpecStackConfig | None = None, calibration: bool | None = False
) -> SpecStackGenerator:
    """The generator asked for; sets the number of torch threads. calibration: as in `from_pretrained`."""
    return load_generators(arguments, [arguments.precision], config, calibration)[0]


def load_generators(
    arguments: argparse.Namespace,
    precisions: Sequence[str],
    config: SpecStackConfig | None = None,
    calibration: bool | None = False,
) -> list[SpecStackGenerator]:
    """One generator per precision of the target, by the paper's rule: a script that wants a calibration names it."""
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.target, arguments.draft)
    return [
        SpecStackGenerator.from_pretrained(
            arguments.target,
            arguments.draft,
            precision=precision,
            draft_precision=arguments.draft_precision,
            device=arguments.device,
            config=config,
            calibration=calibration,
        )
        for precision in precisions
    ]
