"""Tokens per second at each precision: plain decoding, the best fixed gamma, and `throughput`.

The best fixed gamma of a precision is the one that was fastest in the RECORDS of profile_steps.py. All variants of all
precisions run in turn within a prompt, the order turning by one from prompt to prompt; a prompt's time is the median
over repeats. `throughput` keeps what it learns over the whole run, as in a server. Figures are of the decode steps with
the loop around them, and of whole calls. Prints tables, ends in one JSON line.

    python -m experiments.speed.bench_precisions experiments/results/profile.parquet
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_model_arguments, load_generators
from experiments.common.prompt_files import choose_prompts
from experiments.common.script import run_script
from experiments.policies.analyze_profile import best_gamma, fixed_runs
from experiments.policies.bench_policies import Contest, gain, per_prompt
from spec_stack.controller.registry import make_policy
from spec_stack.offline.records import read_records

KINDS = ("plain", "best fixed", "throughput")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="a file of profile_steps.py")
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    add_model_arguments(parser)
    parser.add_argument("--per-task", type=int, default=6, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    prompts = choose_prompts(arguments.prompts, arguments.per_task)
    records = read_records(arguments.records)
    precisions = list(dict.fromkeys(record.precision for record in records))
    best = {precision: best_gamma(fixed_runs(records, precision))[0] for precision in precisions}

    generators = dict(zip(precisions, load_generators(arguments, precisions), strict=True))
    encoded = [prompt.encode(generators[precisions[0]].tokenizer, arguments.max_prompt_tokens) for prompt in prompts]
    contest = Contest(arguments.tokens)
    variants: dict[str, Callable[[list[int], str, int], list[int]]] = {}
    for precision, generator in generators.items():
        policies = make_policy("fixed", gamma=0), make_policy("fixed", gamma=best[precision]), make_policy("throughput")
        for kind, policy in zip(KINDS, policies, strict=True):
            variants[f"{precision} {kind}"] = partial(contest.ours, generator, policy)
    contest.run(variants, encoded, arguments.repeats)

    print(f"{len(prompts)} prompts, {arguments.tokens} tokens each; decode tokens/s (tokens/s of the whole call)")
    print("      target MB  draft MB" + "".join(f"{kind:>16s}" for kind in KINDS), end="")
    print(f"{'over plain [95 %]':>26s}{'over best fixed [95 %]':>26s}  acceptance")
    result: dict[str, Any] = {}
    for precision, generator in generators.items():
        metrics = generator.generate(input_ids=encoded[0], max_tokens=1).metrics
        row = summary_of(contest, precision, len(prompts))
        row |= {
            "best_fixed_gamma": best[precision],
            "target_mb": metrics.target_weight_bytes / 1e6,
            "draft_mb": metrics.draft_weight_bytes / 1e6,
        }
        result[precision] = row
        cells = [f"{row['decode_tokens_per_s'][kind]:.0f} ({row['tokens_per_s'][kind]:.0f})" for kind in KINDS]
        cells[1] += f" at {best[precision]}"
        gains = [row["throughput_over_plain"], row["throughput_over_best_fixed"]]
        print(
            f"{precision:6s}{row['target_mb']:9.1f}{row['draft_mb']:10.1f}" + "".join(map("{:>16s}".format, cells)),
            end="",
        )
        print("".join(f"{f'{middle:+.1%} [{low:+.1%}, {high:+.1%}]':>26s}" for middle, low, high in gains), end="")
        print(f"{row['acceptance_rate']:12.1%}")
    print(json.dumps({"experiment": "bench_precisions", **describe(), "result": result}))


def summary_of(contest: Contest, precision: str, num_prompts: int) -> dict[str, Any]:
    """Tokens/s of the three variants of one precision, gains with intervals, and how far the repeats spread."""
    names = {kind: f"{precision} {kind}" for kind in KINDS}
    decode = {kind: per_prompt(contest.decode_seconds[name]) for kind, name in names.items()}
    whole = {kind: per_prompt(contest.seconds[name]) for kind, name in names.items()}
    ours = names["throughput"]
    return {
        # The first token of a densely read prompt is not a decode step's.
        "decode_tokens_per_s": {
            kind: num_prompts * (contest.num_tokens - 1) / seconds.sum() for kind, seconds in decode.items()
        },
        "tokens_per_s": {kind: num_prompts * contest.num_tokens / seconds.sum() for kind, seconds in whole.items()},
        "throughput_over_plain": gain(decode["throughput"], decode["plain"]),
        "throughput_over_best_fixed": gain(decode["throughput"], decode["best fixed"]),
        "acceptance_rate": contest.accepted[ours] / max(contest.proposed[ours], 1),
        "relative_spread_of_repeats": {
            kind: float(np.median([_spread(values) for values in contest.decode_seconds[name].values()]))
            for kind, name in names.items()
        },
    }


def _spread(seconds: list[float]) -> float:
    """Interquartile range over the median."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return float((high - low) / middle)


if __name__ == "__main__":
    run_script(main)
