"""How well does `spec-stack doctor --measure` foretell lengths that it did not use?

Runs what the doctor runs, by processor seconds, then dense and sparse prompts of other lengths in turn, --repeats of
each, and prints what was expected beside what was measured (medians). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter, process_time
from typing import Any

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack.cli.measure import lines, long_prompt, measure, ttft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 3072], help="prompt tokens (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="as of the doctor (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    began = perf_counter()
    measured = measure(generator, arguments.minutes, process_time)
    wall_s = perf_counter() - began
    print("\n".join(lines(measured)), flush=True)
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        ids = long_prompt(generator, length)
        runs: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.repeats):
            for is_sparse, seconds in runs.items():
                seconds.append(ttft(generator, ids, is_sparse, process_time))
        for is_sparse, curve in ((False, measured.dense_curve), (True, measured.sparse_curve)):
            took, expected = median(runs[is_sparse]), curve.at(length)
            rows.append({"length": length, "sparse": is_sparse, "measured_s": took, "expected_s": expected})
            kind = "sparse" if is_sparse else "dense"
            print(
                f"{length:6d} {kind:7s} {took:7.2f} s, expected {expected:7.2f} ({expected / took - 1:+.0%})",
                flush=True,
            )
    report = {"experiment": "foretell", **describe(), "wall_s": wall_s, "said": lines(measured), "rows": rows}
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
