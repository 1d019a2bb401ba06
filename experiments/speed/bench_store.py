"""Cost and gain of remembering prompts outside sessions: time to first token with a store and without.

Cases: a prompt that shares nothing with any before, one that is asked again, and another question behind the same
system message and document. Interleaved, medians. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from experiments.common.conversations import make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack import PrefillConfig, SpecStackConfig, StoreConfig

CASES = ("new", "again", "other question")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, default=5200, help="of the document (%(default)s)")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--store", type=int, default=50_000, help="tokens of the store (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    prefill = PrefillConfig(scorer="attention", min_prompt_tokens=1024)
    generators = {
        "none": load_generator(arguments, SpecStackConfig(prefill), calibration=False),
        "store": load_generator(
            arguments, SpecStackConfig(prefill, store=StoreConfig(arguments.store)), calibration=False
        ),
    }
    rows: list[dict[str, Any]] = []
    for mode, options in {"sparse": {}, "dense": {"specprefill": False}}.items():
        for generator in generators.values():
            generator.clear_store()
        # The first one warms up.
        for seed in [0, *range(1, arguments.prompts + 1)]:
            conversation = make_conversation(generators["none"].tokenizer, arguments.tokens, 4, seed, "codes")
            for case in CASES:
                question = conversation.facts[case == "other question"].question
                messages = [{"role": "user", "content": f"{conversation.document}\n\n{question}"}]
                for name, generator in generators.items():
                    metrics = generator.generate(messages=messages, max_tokens=16, **options).metrics
                    if seed:
                        rows.append(
                            {"mode": mode, "case": case, "arm": name, "ttft_s": metrics.ttft_s}
                            | {"num_cached": metrics.num_cached_tokens}
                        )
    table = []
    for mode in ("sparse", "dense"):
        for case in CASES:
            own = [row for row in rows if (row["mode"], row["case"]) == (mode, case)]
            times = {arm: median(row["ttft_s"] for row in own if row["arm"] == arm) for arm in generators}
            cached = median(row["num_cached"] for row in own if row["arm"] == "store")
            table.append({"mode": mode, "case": case, **{f"{arm}_ttft_s": time for arm, time in times.items()}})
            table[-1]["num_cached"] = cached
            print(
                f"{mode:6s}  {case:14s}  without {1e3 * times['none']:7.1f} ms  with {1e3 * times['store']:7.1f} ms  "
                f"cached {cached:6.0f}"
            )
    report = {"experiment": "bench_store", **describe(), "tokens": arguments.tokens, "table": table}
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
