"""SpecKV's question on a real pair: do signals and the best gamma change with the target's precision?

Asks of texts that a target wrote at several precisions (`record_texts.py --precision …`), with one draft: how the
draft's confidence and entropy go with what is accepted, how much of four tokens is, and which gamma is best, by tokens
a step, as the paper counts, and by seconds. Prompts that one file lacks count for none. Replays the texts at fixed
gammas (`simulated_pair.py`); prints the table with the paper's correlations beside it and ends in one JSON line.
Seconds are those of one cost ratio for all precisions, so that what differs is acceptance.

    precisions.py fp16=texts.jsonl int8=texts_int8.jsonl nf4=texts_nf4.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.reproduce import PAPER_CORRELATIONS
from experiments.policies.simulate_texts import QWEN_VERIFY_MS, read_costs
from experiments.policies.simulated_pair import Costs, Run, Text, read_rows, read_texts, run_texts
from spec_stack.controller.base import StepRecord
from spec_stack.controller.registry import make_policy

GAMMAS = (1, 2, 3, 4, 6, 8)
# The paper's.
RECORDED_GAMMAS = (2, 4, 6, 8)
_DRAWS = 2000


def read_common(files: Mapping[str, Path]) -> dict[str, list[Text]]:
    """Return every precision's texts of the prompts that all files have. Raises ValueError where there are none."""
    prompts = [{tuple(row["prompt"]) for row in read_rows(path)} for path in files.values()]
    common = set.intersection(*prompts)
    if not common:
        raise ValueError("the files have no prompt in common: record the same ones at every precision")
    return {name: read_texts([path], common) for name, path in files.items()}


def runs_of(texts: Sequence[Text], costs: Costs) -> dict[int, list[Run]]:
    """Every text at every gamma."""
    return {gamma: run_texts(texts, partial(make_policy, "fixed", gamma=gamma), "model", costs) for gamma in GAMMAS}


def with_interval(by_gamma: dict[int, list[Run]]) -> dict[str, list[float]]:
    """Correlation of a step's mean entropy, and of its mean confidence, with the share of its tokens that is accepted;
    each with its 95 % interval by a bootstrap over texts."""
    of_texts = [
        np.array([_signals(step) for gamma in RECORDED_GAMMAS for step in by_gamma[gamma][at].steps if step.gamma])
        for at in range(len(by_gamma[RECORDED_GAMMAS[0]]))
    ]
    of_texts = [rows for rows in of_texts if len(rows)]
    generator = np.random.default_rng(0)
    draws = generator.integers(len(of_texts), size=(_DRAWS, len(of_texts)))
    drawn = [_correlations([of_texts[at] for at in draw]) for draw in draws]
    bounds = np.percentile(np.array(drawn), [2.5, 97.5], axis=0).T.tolist()
    estimate = _correlations(of_texts)
    names = ("entropy", "confidence")
    return {name: [value, *bound] for name, value, bound in zip(names, estimate, bounds, strict=True)}


def _signals(step: StepRecord) -> tuple[float, float, float]:
    return step.signals.mean_entropy, step.signals.mean_confidence, step.num_accepted / step.gamma


def _correlations(of_texts: Sequence[np.ndarray]) -> list[float]:
    found = np.corrcoef(np.concatenate(of_texts), rowvar=False)
    return [float(found[0, 2]), float(found[1, 2])]


def told_of(by_gamma: dict[int, list[Run]], task: str | None) -> dict[str, Any]:
    """What one task's texts, or all of them, say of gammas."""
    own = {gamma: [run for run in runs if task in (None, run.task)] for gamma, runs in by_gamma.items()}
    steps = {gamma: [step for run in runs for step in run.steps] for gamma, runs in own.items()}
    per_step = {gamma: float(np.mean([step.num_tokens for step in found])) for gamma, found in steps.items()}
    seconds = {gamma: sum(run.decode_s for run in runs) for gamma, runs in own.items()}
    drafted = sum(step.gamma for step in steps[4])
    return {
        "texts": len(own[4]),
        "accepted_of_4": sum(step.num_accepted for step in steps[4]) / drafted,
        "tokens_per_step_of_4": per_step[4],
        "best_per_step": max(per_step, key=lambda gamma: per_step[gamma]),
        "best_per_second": min(seconds, key=lambda gamma: seconds[gamma]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="PRECISION=FILE of record_texts.py")
    parser.add_argument("--ratio", type=float, default=0.45, help="draft token over plain step (%(default)s)")
    parser.add_argument("--verify-ms", default=QWEN_VERIFY_MS, help="a step's, by tokens fed (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = Costs.at(arguments.ratio, read_costs(arguments.verify_ms))
    report: dict[str, Any] = {"experiment": "precisions", **describe(), "ratio": arguments.ratio, "precisions": {}}
    files: dict[str, Path] = {}
    for named in arguments.texts:
        precision, found, path = named.partition("=")
        if not found:
            parser.error(f"{named!r} is not of the form PRECISION=FILE")
        files[precision] = Path(path)
    for precision, texts in read_common(files).items():
        by_gamma = runs_of(texts, costs)
        own: dict[str, Any] = {"correlations": with_interval(by_gamma), "tasks": {}}
        told = "  ".join(
            f"{name} {v:+.2f} [{low:+.2f}, {high:+.2f}]" for name, (v, low, high) in own["correlations"].items()
        )
        paper = PAPER_CORRELATIONS.get("fp16" if precision == "bf16" else precision, (float("nan"),) * 2)
        print(f"{precision}: correlation with what is accepted: {told}; the paper {paper[0]:+.2f}, {paper[1]:+.2f}")
        for task in [*dict.fromkeys(text.task for text in texts), None]:
            row = told_of(by_gamma, task)
            own["tasks"][task or "all"] = row
            print(
                f"    {task or 'all':10s} n={row['texts']:3d}  of 4 accepted {row['accepted_of_4']:.2f}, "
                f"{row['tokens_per_step_of_4']:.2f} tokens a step; best gamma by tokens a step {row['best_per_step']}, "
                f"by seconds {row['best_per_second']}",
                flush=True,
            )
        report["precisions"][precision] = own
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
