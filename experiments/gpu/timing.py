"""Timing on a device within a budget: interleaved repeats, peak memory, and what to do when memory runs out."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_stack.devices import synchronize


class Budget:
    """Seconds of wall clock, from now on."""

    def __init__(self, seconds: float) -> None:
        self._started = perf_counter()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        return perf_counter() - self._started

    @property
    def left(self) -> float:
        return self.seconds - self.spent


@dataclass
class Timings:
    """One variant's seconds per repeat; those of its warm-up are kept apart. error: why there are no more."""

    seconds: list[float] = field(default_factory=list)
    warm_up_s: float | None = None
    peak_bytes: int = 0
    error: str | None = None

    @property
    def last_s(self) -> float:
        return self.seconds[-1] if self.seconds else self.warm_up_s or 0.0

    @property
    def median_s(self) -> float:
        """The median; nan where nothing was measured."""
        return median(self.seconds) if self.seconds else math.nan

    def summary(self) -> dict[str, Any]:
        """Milliseconds and GB, ready for JSON."""
        report: dict[str, Any] = {"repeats": len(self.seconds)}
        if self.seconds:
            found = {"ms": self.median_s, "min": min(self.seconds), "max": max(self.seconds)}
            report |= {name: round(value * 1e3, 3) for name, value in found.items()}
        if self.peak_bytes:
            report["peak_gb"] = round(self.peak_bytes / 1e9, 2)
        return report | ({"error": self.error} if self.error else {})


def describe_error(error: RuntimeError) -> str:
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"[:300]


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run, the device idle before and after it; nothing warms up."""
    synchronize(device)
    started = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - started


def _add_run(run: Callable[[], Any], timings: Timings, device: torch.device, warms_up: bool) -> None:
    """Time a run, or note why it failed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds = once(run, device)
    except RuntimeError as error:
        timings.error = describe_error(error)
    else:
        timings.warm_up_s = seconds if warms_up else timings.warm_up_s
        timings.seconds += [] if warms_up else [seconds]
    if device.type == "cuda":
        timings.peak_bytes = max(timings.peak_bytes, torch.cuda.max_memory_allocated(device))
    if timings.error:
        # After the handler, when the traceback no longer holds the tensors.
        free(device)


def interleave(
    variants: dict[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    budget: Budget,
) -> dict[str, Timings]:
    """Time all variants in turn, after a warm-up round, with the device idle at both ends. A variant that fails is left
    out of later rounds; where one took longer last time than the budget has left, no more is run."""
    results = {name: Timings() for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            timings = results[name]
            if timings.error:
                continue
            if timings.last_s > budget.left or budget.left <= 0:
                return results
            _add_run(run, timings, device, warms_up=repeat == 0)
    return results
