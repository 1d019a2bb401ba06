"""How soon an answer's first token comes, and its last; where two answers part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_stack import SpecStackGenerator, StepOutput
from spec_stack.hf.model import CachedModel
from spec_stack.types import Metrics


@dataclass(frozen=True)
class Timed:
    """A whole answer; seconds to its first step and to its last, the call included."""

    text: str
    metrics: Metrics
    first_s: float
    total_s: float


def timed(start: Callable[[], Iterator[StepOutput]], clock: Callable[[], float]) -> Timed:
    """Start a stream and read it to its end."""
    began = clock()
    steps = start()
    outputs = [next(steps)]
    first_s = clock() - began
    outputs += steps
    total_s = clock() - began
    metrics = outputs[-1].metrics
    if metrics is None:
        raise RuntimeError("the stream ended without a last step")
    return Timed("".join(output.text for output in outputs), metrics, first_s, total_s)


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
