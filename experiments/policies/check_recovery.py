"""Does recovering per-token signals from step aggregates bias the scores of policies?

The authors' CSVs hold mean and extreme per step, not signals per token; published.py recovers those from four runs
over one text. Here the same is done to runs whose signals are known: RECORDS (greedy, gammas 2, 4, 6, 8, by
record_runs.py) are reduced to the authors' columns, with their rounding, recovered, and policies that
stop by signals are replayed on truth and recovery. The difference in tokens/s is the bias to expect in
evaluate_policies.py on the authors' data. Costs are the authors' three precisions' (--published) or the records' own.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.common.script import run_script
from experiments.policies import published
from spec_stack.controller.base import StepRecord
from spec_stack.controller.registry import make_policy
from spec_stack.offline.records import read_records
from spec_stack.offline.replay import Costs, ReplayText, fit_costs, merge_runs, replay

POLICIES: dict[str, tuple[str, dict[str, float]]] = {
    "throughput": ("throughput", {}),
    "confidence 0.4": ("confidence", {"threshold": 0.4}),
    "confidence 0.7": ("confidence", {"threshold": 0.7}),
    "confidence 0.9": ("confidence", {"threshold": 0.9}),
}


class Reduced:
    """Runs as the authors would have written them: rounded mean and extreme per step."""

    def __init__(self, records: list[StepRecord]) -> None:
        self.runs: list[published.Run] = []
        aggregates: list[tuple[float, float, float, float]] = []
        for (prompt, policy), group in itertools.groupby(
            records, key=lambda record: (record.request_id, record.policy)
        ):
            steps, start, task = [], 0, ""
            for record in group:
                if record.gamma:
                    signals = record.signals
                    steps.append((start, record.gamma, record.num_accepted, len(aggregates)))
                    aggregates.append(
                        (signals.mean_entropy, signals.max_entropy, signals.mean_confidence, signals.min_confidence)
                    )
                start, task = start + record.num_tokens, record.task
            gamma = int(policy.removeprefix("fixed-"))
            self.runs.append(published.Run(records[0].precision, gamma, task, prompt, 0.0, start, steps))
        self.mean_entropy, self.max_entropy, self.mean_confidence, self.min_confidence = np.round(aggregates, 4).T

    def recovered(self, seed: int, costs: Costs) -> tuple[list[ReplayText], float]:
        """The texts with recovered signals, and the share of positions that were determined."""
        records: list[StepRecord] = []
        determined: list[bool] = []
        for _, group in itertools.groupby(self.runs, key=lambda run: run.prompt):
            text = sorted(group, key=lambda run: run.gamma)
            doubt, known = published.recover(text, 1 - self.mean_confidence, 1 - self.min_confidence, seed)
            entropy, _ = published.recover(text, self.mean_entropy, self.max_entropy, seed)
            determined += known
            confidence = {key: 1 - value for key, value in doubt.items()}
            for run in text:
                records += published.as_records(run, entropy, confidence, costs)
        return merge_runs(records).texts, float(np.mean(determined))


def tokens_per_s(texts: list[ReplayText], policy: str, costs: Costs) -> float:
    name, options = POLICIES[policy]
    running = make_policy(name, **options)
    scores = [replay(text, running, costs, reserve=0) for text in texts]
    return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--published", type=Path, help="the authors' folder, for its three precisions' costs")
    parser.add_argument("--seeds", type=int, default=3, help="worlds drawn (%(default)s)")
    options = parser.parse_args()
    records = read_records(*options.records)
    reduced = Reduced(records)
    costs: Mapping[str, Costs] = published.load(options.published).costs if options.published else fit_costs(records)
    any_costs = next(iter(costs.values()))
    truth = merge_runs(records).texts
    outcomes = [reduced.recovered(seed, any_costs) for seed in range(options.seeds)]
    worlds, share = [texts for texts, _ in outcomes], outcomes[0][1]
    print(f"{len(truth)} texts; {share:.1%} of positions determined within {published.DETERMINED}")
    print(f"{'costs':6s} {'policy':16s} {'truth':>8s} {'recovered':>9s} {'bias':>7s}")
    result: dict[str, dict[str, float]] = {}
    for precision, cost in costs.items():
        for policy in POLICIES:
            true = tokens_per_s(truth, policy, cost)
            ours = float(np.mean([tokens_per_s(world, policy, cost) for world in worlds]))
            print(f"{precision:6s} {policy:16s} {true:8.2f} {ours:9.2f} {ours / true - 1:+7.2%}")
            result.setdefault(precision, {})[policy] = ours / true - 1
    print(json.dumps({"determined": share, "bias": result}))


if __name__ == "__main__":
    run_script(main)
