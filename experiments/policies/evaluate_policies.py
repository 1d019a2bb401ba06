"""Which policy gives most tokens per second? `spec-stack bench RECORDS` as a script, for results with their commit.

RECORDS are .jsonl files that `records=` of generate wrote (greedy runs of the same prompts at several fixed gammas),
or the profile of the embedded pair, experiments/results/profile.parquet. `spec_stack.bench.recorded` says how prompts
are split and what policies may know.

--draft-costs replays the same texts at other costs of a drafted token, as shares of a plain step, and --useless with
a draft that is always wrong and never sure, or always wrong and always sure.

--as-published instead repeats the SpecKV paper's own tables, from the folder of the authors' CSVs, beside the paper's
figures.

    python -m experiments.policies.evaluate_policies RECORDS...
    python -m experiments.policies.evaluate_policies RECORDS... --draft-costs 0.1 0.5 --useless unsure
    python -m experiments.policies.evaluate_policies CSV_FOLDER --as-published
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies import published, reproduce
from spec_stack.bench.recorded import read, replay_policies
from spec_stack.bench.replay import Costs
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.settings.plugins import import_plugins

# Entropy in bits and confidence of a draft that is always wrong.
_WRONG = {"unsure": (10.0, 0.05), "sure": (0.1, 0.98)}


@dataclass(frozen=True)
class ShareOfPlain(Costs):
    """A drafted token costs a share of a plain step; verification costs the same at any length."""

    share: float

    def draft_s(self, gamma: int) -> float:
        return self.share * gamma

    def verify_s(self, gamma: int) -> float:
        return 1.0


def always_wrong(records: Sequence[StepRecord], entropy: float, confidence: float) -> list[StepRecord]:
    """The same requests by a draft none of whose tokens is accepted: a step of eight tokens for each output token."""
    found = []
    for request_id, precision in dict.fromkeys((record.request_id, record.precision) for record in records):
        own = [record for record in records if (record.request_id, record.precision) == (request_id, precision)]
        run = [record for record in own if record.policy == own[0].policy]
        step = replace(
            run[-1],
            is_prefill=False,
            gamma=8,
            num_accepted=0,
            num_tokens=1,
            signals=DraftSignals([entropy] * 8, [confidence] * 8),
        )
        found += [replace(step, step=number) for number in range(sum(record.num_tokens for record in run))]
    return found


def as_published(folder: Path, num_resamples: int) -> dict[str, Any]:
    """Print the paper's tables beside ours."""
    table = published.read_steps(folder / published.STEPS_FILE)
    cells = reproduce.reproduce(table, published.best_gammas(folder / published.RUNS_FILE), num_resamples)
    print(f"{'table':6s} {'cell':30s} {'paper':>10s} {'ours':>10s} {'difference':>10s}")
    for cell in cells:
        mark = "" if cell.within else "  <-- off"
        print(f"{cell.table:6s} {cell.name:30s} {cell.paper:10.3f} {cell.ours:10.3f} {cell.difference:+10.3f}{mark}")
    off = [cell.name for cell in cells if not cell.within]
    print(f"\n{len(cells) - len(off)} of {len(cells)} cells within tolerance")
    largest = max(abs(cell.difference) for cell in cells)
    return {"cells": len(cells), "within": len(cells) - len(off), "off": off, "largest_difference": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="files of records, or the authors' folder")
    parser.add_argument("--as-published", action="store_true", help="repeat the SpecKV paper's tables")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="start policies anew in each fold")
    parser.add_argument("--draft-costs", type=float, nargs="+", help="of a drafted token, in plain steps")
    parser.add_argument("--useless", choices=_WRONG, help="a draft that is always wrong")
    parser.add_argument("--max-gamma", type=int, default=MAX_GAMMA)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    add_out_argument(parser)
    options = parser.parse_args()
    if not 1 <= options.max_gamma <= MAX_GAMMA:
        parser.error(f"--max-gamma must be 1 to {MAX_GAMMA}, got {options.max_gamma}")
    header = {"experiment": "evaluate_policies", **describe()}
    if options.as_published:
        print_report({**header, **as_published(options.records[0], 10_000)}, options.out)
        return
    import_plugins()
    records = read(options.records)
    if options.useless:
        records = always_wrong(records, *_WRONG[options.useless])
    boards = {}
    for cost in options.draft_costs or [None]:
        costs = None if cost is None else {record.precision: ShareOfPlain(cost) for record in records}
        how = {"num_folds": options.folds, "max_gamma": options.max_gamma, "seed": options.seed}
        board = replay_policies(records, experienced=not options.cold, costs=costs, **how)
        print(board.table() if cost is None else f"\na drafted token costs {cost:g} of a plain step; {board.table()}")
        boards["as recorded" if cost is None else f"{cost:g}"] = board.as_dict()
    print_report({**header, "boards": boards}, options.out)


if __name__ == "__main__":
    run_script(main)
