"""Cost of sparse prefill and speculation on a GPU, at real model shapes with random weights made on the device.

Weights change no cost but the number of accepted tokens, so nothing here speaks of acceptance or quality; whether
chunked sparse prefill is right on the device is what `pytest -m gpu` tells. Measured: the server's scoring attention at
new lengths; steps that grow a cache, eager and in fixed shapes; time to first token, dense against sparse with the
scoring included, against the bound 1/(r + s); a verification of 1 to 9 tokens over a plain step.

Needs torch and transformers alone, and this repository on the path. Wall clock, the device idle before and after
each run; variants in turn, medians with spread. No case begins after the budget; the report is written after every
case. Prints a line a case, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from experiments.common import script
from experiments.common.environment import describe
from experiments.gpu.cases import bench_decode, bench_growing, bench_prefill, bench_scoring_attention
from experiments.gpu.shapes import SHAPES, Models, Shape
from spec_stack.config import DraftStep
from spec_stack.hf.loading import resolve_device

Case = Callable[[], dict[str, Any]]


def cases_of(shape: Shape, device: torch.device, repeats: int) -> dict[str, Case]:
    """The cases of a shape by name, in order."""
    models, cached = Models(shape, device), min(shape.cached)
    steps: tuple[DraftStep, ...] = ("eager", "static", *(("compiled",) if device.type == "cuda" else ()))
    # Before anything else has run at these lengths: the first call is what a new prompt pays.
    cases: dict[str, Case] = {
        f"scoring attention {length}": partial(bench_scoring_attention, models, length) for length in shape.lengths[:3]
    }
    cases |= {f"growing {step}": partial(bench_growing, models, cached, step) for step in steps}
    prefills: dict[str, Case] = {
        f"prefill {length}": partial(bench_prefill, models, length, repeats) for length in shape.lengths
    }
    decodes: dict[str, Case] = {
        f"decode {role} {cached}": partial(bench_decode, models, role, cached, 2 * repeats)
        for role in ("draft", "target")
        for cached in shape.cached
    }
    early = list(prefills)[:2]
    return cases | {name: prefills.pop(name) for name in early} | decodes | prefills


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def run_cases(cases: dict[str, Case], budget_s: float, device: torch.device, save: Callable[[Any], None]) -> None:
    """Run cases until the budget is spent; save is called after each with the results so far."""
    results: dict[str, Any] = {"cases": {}, "skipped": [], "spent_s": 0.0}
    began = perf_counter()
    for name, run in cases.items():
        started = perf_counter()
        if started - began >= budget_s:
            results["skipped"].append(name)
            print(f"skipped {name}: the budget is spent")
        else:
            try:
                found = run()
            except RuntimeError as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            results["cases"][name] = found | {"took_s": round(perf_counter() - started, 1)}
            print(f"{name}: {json.dumps(results['cases'][name])}", flush=True)
        results["spent_s"] = round(perf_counter() - began, 1)
        save(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="sizes of the pair (%(default)s)")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    parser.add_argument("--budget-s", type=float, default=400, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of a prefill (%(default)s)")
    parser.add_argument("--commit", help="what to call the code where git is not at hand")
    parser.add_argument("--out", type=Path, help="file for the JSON report, written after every case")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be 1 or more, got {arguments.repeats}")
    device = resolve_device(arguments.device)
    shape = SHAPES[arguments.shape]
    if device.type == "cpu" and shape is not SHAPES["tiny"]:
        raise ValueError(f"{arguments.shape} takes hours on a CPU; add --shape tiny, or run it on a CUDA device")
    report: dict[str, Any] = {"experiment": "bench_gpu", **describe(), **_describe_device(device)}
    report |= {"shape": arguments.shape, "prefill_chunk": shape.prefill_chunk, "budget_s": arguments.budget_s}
    if arguments.commit:
        report["commit"] = arguments.commit
    print(f"{report['device']}, torch {report['torch']}, transformers {report['transformers']}; {arguments.shape}")

    def save(results: dict[str, Any]) -> None:
        report.update(results)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report) + "\n", encoding="utf-8")

    run_cases(cases_of(shape, device, arguments.repeats), arguments.budget_s, device, save)
    print(json.dumps(report))


if __name__ == "__main__":
    script.run(main)
