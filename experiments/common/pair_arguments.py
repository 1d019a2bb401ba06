"""The options by which every script takes a draft/target pair."""

from __future__ import annotations

import argparse

import torch

from experiments.common.environment import note_pair
from spec_stack import SpecStackConfig, SpecStackGenerator
from spec_stack.config import LoadConfig


def add_pair_arguments(parser: argparse.ArgumentParser, threads: int = 1) -> None:
    parser.add_argument("--target", help="target model (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--draft-precision", default=LoadConfig.draft_precision)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=threads, help="torch threads (%(default)s)")
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
