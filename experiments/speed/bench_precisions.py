"""Tokens per second at each precision: plain decoding, the best fixed gamma, and live policies.

The best fixed gamma of a precision is the one that was fastest in the RECORDS of profile_steps.py. All variants of all
precisions run in turn within a prompt, the order turning by one from prompt to prompt; a prompt's time is the median
over repeats. Policies keep what they learn over the whole run, as in a server; the draft alone proposes. Figures are of
the decode steps with the loop around them, and of whole calls. Prints tables, ends in one JSON line.

    python -m experiments.speed.bench_precisions experiments/results/profile.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_model_arguments, load_generators
from experiments.common.prompt_files import choose_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.analyze_profile import best_gamma, fixed_runs
from experiments.policies.bench_policies import Contest, gain, per_prompt
from spec_stack.controller.registry import POLICY_NAMES, make_policy
from spec_stack.offline.records import read_records

PLAIN, BEST_FIXED = "plain", "best fixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="a file of profile_steps.py")
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    add_model_arguments(parser)
    parser.add_argument("--per-task", type=int, default=6, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=["throughput"], help="%(default)s")
    add_out_argument(parser)
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
        policies = {PLAIN: make_policy("fixed", gamma=0), BEST_FIXED: make_policy("fixed", gamma=best[precision])}
        # `speckv` gets the predictor that a user of the pair gets.
        files = generator.pair.predictors
        policies |= {
            name: make_policy(name, **({"predictor": files[name]} if name in files else {}))
            for name in arguments.policies
        }
        for kind, policy in policies.items():
            variants[f"{precision} {kind}"] = partial(contest.ours, generator, policy)
    contest.run(variants, encoded, arguments.repeats)

    print(f"{len(prompts)} prompts x {arguments.tokens} tokens; decode tokens/s (of the whole call), gains")
    kinds = [PLAIN, BEST_FIXED, *arguments.policies]
    result: dict[str, Any] = {}
    for precision, generator in generators.items():
        metrics = generator.generate(input_ids=encoded[0], max_tokens=1).metrics
        row = summary_of(contest, precision, len(prompts), kinds)
        row |= {
            "best_fixed_gamma": best[precision],
            "target_mb": metrics.target_weight_bytes / 1e6,
            "draft_mb": metrics.draft_weight_bytes / 1e6,
        }
        result[precision] = row
        sizes = f"target {row['target_mb']:.1f} MB, draft {row['draft_mb']:.1f} MB"
        print(f"{precision}: {sizes}, best fixed {best[precision]}")
        for kind in kinds:
            cells = f"{row['decode_tokens_per_s'][kind]:.0f} ({row['tokens_per_s'][kind]:.0f})"
            gains = (row["over_plain"][kind], row["over_best_fixed"][kind])
            shown = "".join(f"{f'{middle:+.1%} [{low:+.1%}, {high:+.1%}]':>26s}" for middle, low, high in gains)
            print(f"  {kind:12s}{cells:>16s}{shown}  acceptance {row['acceptance_rate'][kind]:.1%}")
    line = {"experiment": "bench_precisions", **describe(), "result": result}
    print_report(line, arguments.out)


def summary_of(contest: Contest, precision: str, num_prompts: int, kinds: list[str]) -> dict[str, Any]:
    """Tokens/s of the variants of one precision, paired gains with intervals, and how far the repeats spread."""
    names = {kind: f"{precision} {kind}" for kind in kinds}
    decode = {kind: per_prompt(contest.decode_seconds[name]) for kind, name in names.items()}
    whole = {kind: per_prompt(contest.seconds[name]) for kind, name in names.items()}
    return {
        # The first token of a densely prefilled prompt is not a decode step's.
        "decode_tokens_per_s": {
            kind: num_prompts * (contest.num_tokens - 1) / seconds.sum() for kind, seconds in decode.items()
        },
        "tokens_per_s": {kind: num_prompts * contest.num_tokens / seconds.sum() for kind, seconds in whole.items()},
        "over_plain": {kind: gain(seconds, decode[PLAIN]) for kind, seconds in decode.items()},
        "over_best_fixed": {kind: gain(seconds, decode[BEST_FIXED]) for kind, seconds in decode.items()},
        "acceptance_rate": {
            kind: contest.accepted[name] / max(contest.proposed[name], 1) for kind, name in names.items()
        },
        "seconds": {kind: contest.seconds[name] for kind, name in names.items()},
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
