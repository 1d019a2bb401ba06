"""Cost of sparse prefill and speculation on a GPU, at real model shapes with random weights made on the device.

Weights change no cost but the number of accepted tokens, so nothing here speaks of acceptance or quality; whether
chunked sparse prefill is right on the device is what `pytest -m gpu` tells. Measured: the server's scoring attention at
new lengths; steps that grow a cache, eager and in fixed shapes; time to first token, dense against sparse with the
scoring included, against the bound 1/(r + s); a verification of 1 to 9 tokens over a plain step.

Needs torch and transformers alone, and this repository on the path. Wall clock, the device idle before and after
each run; variants in turn, medians with spread. Cases that the budget has no room for are skipped and listed; the
report is written after every case. Prints a line a case, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.gpu.cases import bench_decode, bench_growing, bench_prefill, bench_scoring_attention
from experiments.gpu.shapes import SHAPES, Models, Shape, executed_macs
from experiments.gpu.timing import Budget, describe_error, free
from spec_stack.config import DraftStep
from spec_stack.hf.loading import resolve_device

# Multiply-adds per second expected before anything was measured; on the slow side for a data-centre card.
_FIRST_GUESS = {"cuda": 1.2e14}
_ANY_DEVICE = 2e9
# A round longer than this is not worth a whole warm-up round: its kernels have run at the shorter lengths.
_LONG_ROUND_S = 10.0


@dataclass(frozen=True)
class Case:
    """run: takes nothing, returns plain values. estimate_s: seconds it will take at least."""

    name: str
    run: Callable[[], dict[str, Any]]
    estimate_s: Callable[[], float] = lambda: 0.0


class Bench:
    """The cases of a shape, in order, and the speed that the device has shown so far."""

    def __init__(self, shape: Shape, device: torch.device, repeats: int, budget: Budget) -> None:
        self.models, self.repeats, self.budget = Models(shape, device), repeats, budget
        self._macs_per_s = _FIRST_GUESS.get(device.type, _ANY_DEVICE)

    def cases(self) -> list[Case]:
        shape = self.models.shape
        cached = min(shape.cached)
        steps: tuple[DraftStep, ...] = ("eager", "static")
        prefills = [
            Case(f"prefill {length}", partial(self._prefill, length), partial(self._two_rounds_s, length))
            for length in shape.lengths
        ]
        return [
            # Before anything else has run at these lengths: the first call is what a new prompt pays.
            *(
                Case(f"scoring attention {length}", partial(bench_scoring_attention, self.models, length))
                for length in sorted(shape.lengths)[:3]
            ),
            *(Case(f"growing {step}", partial(bench_growing, self.models, cached, step)) for step in steps),
            *prefills[:2],
            *(
                Case(
                    f"decode {role} {cached}",
                    partial(bench_decode, self.models, role, cached, 2 * self.repeats, self.budget),
                )
                for role in ("draft", "target")
                for cached in shape.cached
            ),
            *prefills[2:],
        ]

    def _round_s(self, length: int) -> float:
        """Seconds that one round of a prefill case will take: dense twice, the draft alone and in each sparse run."""
        shape = self.models.shape
        num_tokens, rates = shape.num_tokens(length), shape.keep_rates
        macs = 2 * executed_macs(shape.target, num_tokens) + (1 + len(rates)) * executed_macs(shape.draft, num_tokens)
        kept = sum(executed_macs(shape.target, round(rate * num_tokens)) for rate in rates)
        return (macs + 2 * kept) / self._macs_per_s

    def _two_rounds_s(self, length: int) -> float:
        """A warm-up and one repeat; of a long one, one repeat after a little of a warm-up."""
        round_s = self._round_s(length)
        return 1.1 * round_s if round_s > _LONG_ROUND_S else 2 * round_s

    def _prefill(self, length: int) -> dict[str, Any]:
        is_long = self._round_s(length) > _LONG_ROUND_S
        repeats = min(self.repeats, 3) if is_long else self.repeats
        report = bench_prefill(self.models, length, repeats, self.budget, warms_up_all=not is_long)
        if "ms" in report["times"]["dense"]:
            dense_s = report["times"]["dense"]["ms"] / 1e3
            self._macs_per_s = executed_macs(self.models.shape.target, report["tokens"]) / dense_s
        return report


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def run_cases(cases: list[Case], budget: Budget, device: torch.device, save: Callable[[dict[str, Any]], None]) -> None:
    """Run what fits the budget; save is called after each case with its results so far: cases, skipped, spent_s."""
    results: dict[str, Any] = {"cases": {}, "skipped": {}, "spent_s": 0.0}
    for case in cases:
        needed = case.estimate_s()
        if max(needed, 0.1) > budget.left:
            results["skipped"][case.name] = f"needs about {needed:.0f} s, {max(budget.left, 0):.0f} s were left"
            print(f"skipped {case.name}: {results['skipped'][case.name]}")
        else:
            started = budget.spent
            try:
                results["cases"][case.name] = case.run()
            except RuntimeError as error:
                results["cases"][case.name] = {"error": describe_error(error)}
            free(device)
            results["cases"][case.name]["took_s"] = round(budget.spent - started, 1)
            print(f"{case.name}: {json.dumps(results['cases'][case.name])}", flush=True)
        results["spent_s"] = round(budget.spent, 1)
        save(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="sizes of the pair (%(default)s)")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    parser.add_argument("--budget-s", type=float, default=520, help="seconds for all cases together (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of a prefill; 3 at most of a long one (%(default)s)")
    parser.add_argument("--commit", help="what to call the code where git is not at hand")
    parser.add_argument("--out", type=Path, help="file for the JSON report, written after every case")
    arguments = parser.parse_args()
    budget = Budget(arguments.budget_s)
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

    run_cases(Bench(shape, device, arguments.repeats, budget).cases(), budget, device, save)
    print(json.dumps(report))


if __name__ == "__main__":
    run_script(main)
