"""The options of resumable scripts (rows are `spec_stack.bench.rows`), and where two answers part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from spec_stack import SpecStackGenerator
from spec_stack.hf.model import CachedModel


def add_row_arguments(parser: argparse.ArgumentParser, limited: bool = True) -> None:
    """The options of every resumable script. limited: whether it takes as many prompts as there are."""
    parser.add_argument("--rows", type=Path, required=True, help="file of rows; a run goes on after those it holds")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no prompt after so many (no limit)")
    if limited:
        parser.add_argument("--limit", type=int, help="most prompts (default: all)")


def first_divergence(
    generator: SpecStackGenerator, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> tuple[int, float] | None:
    """Where two answers part, and by how much the target prefers the plain one's token there, in logits.

    Returns
    -------
    (int, float) or None
        None where one of the two begins the other. The gap is that of a dense forward over prompt and common answer.
    """
    at = next((index for index, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return None
    ids = [*prompt_ids, *plain[:at]]
    target = CachedModel(generator.target, generator.config.prefill.prefill_chunk)
    logits: torch.Tensor = target.forward(ids, range(len(ids)), 1)[-1].float()
    return at, float(logits[plain[at]] - logits[other[at]])
