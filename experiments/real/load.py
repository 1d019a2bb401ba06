"""Measure what loading a pair takes in memory, and what rows of zeros save in a step of one token.

Memory: the largest resident size of this process after the pair is loaded, over what its weights take (the interpreter
and the libraries counted in). Steps: one token, and two as after one drafted one, over a cache of --cached tokens, with
the rows that the trial at load chose and without, in turn; medians and quartiles of processor seconds. Prints a table,
ends in one JSON line.
"""

from __future__ import annotations

import argparse
import resource
from statistics import median, quantiles
from time import process_time
from typing import Any

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prepack import PrepackedLinear


def time_steps(model: Any, num_cached: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a forward of so many tokens, by whether rows are filled up."""
    layers = [layer for layer in model.modules() if isinstance(layer, PrepackedLinear)]
    chosen = [layer.least_rows for layer in layers]
    cached = CachedModel(model, num_cached)
    cached.prefill([5] * num_cached, range(num_cached))
    taken: dict[str, list[float]] = {"single": [], "filled": []}
    for _ in range(repeats + 1):
        for arm, seconds in taken.items():
            _set_rows(layers, chosen if arm == "filled" else [1] * len(layers))
            began = process_time()
            cached.forward([7] * num_tokens, range(num_cached, num_cached + num_tokens), num_tokens)
            seconds.append(1000 * (process_time() - began))
            cached.rollback(num_tokens)
    _set_rows(layers, chosen)
    report: dict[str, Any] = {arm: [round(each, 2) for each in quantiles(ms[1:], n=4)] for arm, ms in taken.items()}
    report["ratio"] = round(median(taken["filled"][1:]) / median(taken["single"][1:]), 3)
    report["filled_layers"] = f"{sum(least > 1 for least in chosen)} of {len(chosen)}"
    return report


def _set_rows(layers: list[PrepackedLinear], chosen: list[int]) -> None:
    for layer, least in zip(layers, chosen, strict=True):
        layer.least_rows = least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--cached", type=int, default=256, help="tokens in the cache (%(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="steps of each kind (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    if arguments.cached < 1 or arguments.repeats < 2:
        raise ValueError("--cached must be 1 or more, --repeats 2 or more")
    generator = load_generator(arguments)
    # Kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = generator.pair.target_weight_bytes + generator.pair.draft_weight_bytes
    report: dict[str, Any] = {"experiment": "load", **describe()}
    report["precisions"] = [generator.precision, generator.draft_precision]
    report["memory_mb"] = {
        "peak": round(peak / 1e6),
        "weights": round(weights / 1e6),
        "ratio": round(peak / weights, 3),
    }
    print(f"{generator.precision}: peak {peak / 1e6:.0f} MB, weights {weights / 1e6:.0f} MB, {peak / weights:.2f}x")
    for role, model in (("target", generator.target), ("draft", generator.draft)):
        for num_tokens in (1, 2):
            row = time_steps(model, arguments.cached, num_tokens, arguments.repeats)
            report[f"{role}_{num_tokens}"] = row
            single, filled = row["single"], row["filled"]
            print(f"{role:7s}{num_tokens} token(s)  as they are {single} ms, filled {filled} ms: {row['ratio']:.3f}")
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
