"""How soon a stream's first step comes, and its last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spec_stack import StepOutput
from spec_stack.types import Metrics


@dataclass(frozen=True)
class Timed:
    """A whole answer; seconds to its first step and to its last, the call included."""

    text: str
    token_ids: list[int]
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
    token_ids = [token for output in outputs for token in output.token_ids]
    return Timed("".join(output.text for output in outputs), token_ids, metrics, first_s, total_s)
