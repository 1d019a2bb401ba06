"""Timing on a device: interleaved repeats, the device idle before and after each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_stack.devices import synchronize


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one run, the device idle before and after it; nothing warms up."""
    synchronize(device)
    started = perf_counter()
    run()
    synchronize(device)
    return 1e3 * (perf_counter() - started)


def interleave(variants: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of all variants in turn, after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            taken = once(run, device)
            found[name] += [taken] if repeat else []
    return found


def summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and ends of each variant's milliseconds."""
    return {
        name: {key: rounded(value) for key, value in (("ms", median(own)), ("min", min(own)), ("max", max(own)))}
        for name, own in times.items()
    }


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
