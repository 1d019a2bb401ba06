"""Which policy gives most tokens per second? `spec-stack bench RECORDS` as a script, for results with their commit.

RECORDS are .jsonl files that `records=` of generate wrote (greedy runs of the same prompts at several fixed gammas),
or the profile of the embedded pair, experiments/results/profile.parquet. `spec_stack.bench.recorded` says how prompts
are split and what policies may know.

--stress adds what a default must bear: policies that start anew, drafted tokens at other shares of a plain step, and a
draft that is always wrong, unsure of it (confidence 0.05) or sure (0.98).

--as-published instead repeats the SpecKV paper's own tables, from the folder of the authors' CSVs, beside the paper's
figures.

    python -m experiments.policies.evaluate_policies RECORDS...
    python -m experiments.policies.evaluate_policies RECORDS... --stress
    python -m experiments.policies.evaluate_policies CSV_FOLDER --as-published
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.common import script
from experiments.policies import published, reproduce
from spec_stack.bench.leaderboard import ALL, Leaderboard
from spec_stack.bench.recorded import BASELINE, read, replay_policies
from spec_stack.bench.replay import Costs
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.settings.plugins import import_plugins

_COSTS = (0.1, 0.25, 0.5)
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
    published.check_folder(folder)
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


def stress(records: Sequence[StepRecord], num_folds: int) -> Iterator[tuple[str, Leaderboard]]:
    """Leaderboards under conditions that a default must bear; costs and wrong drafts at the first precision."""
    yield "started anew", replay_policies(records, num_folds=num_folds, experienced=False)
    first = records[0].precision
    own = [record for record in records if record.precision == first]
    drafts = {"the draft": own} | {f"always wrong, {how}": always_wrong(own, *_WRONG[how]) for how in _WRONG}
    for name, runs in drafts.items():
        for cost in _COSTS:
            costs = {first: ShareOfPlain(cost)}
            board = replay_policies(runs, num_folds=num_folds, experienced=False, costs=costs)
            yield f"{name}, {cost:g} of a plain step a token", board


def compact(board: Leaderboard, tasks: Sequence[str]) -> dict[str, Any]:
    """Speeds with their intervals by precision, task and policy."""
    report: dict[str, Any] = {"num_prompts": board.lines[0].num_prompts}
    for line in (line for line in board.lines if line.task in tasks):
        ends = [round(each, 4) for each in astuple(line.speed)]
        report.setdefault(line.precision, {}).setdefault(line.task, {})[line.policy] = ends
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="files of records, or the authors' folder")
    parser.add_argument("--as-published", action="store_true", help="repeat the SpecKV paper's tables")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--stress", action="store_true", help="also other starts, costs and drafts")
    options = parser.parse_args()
    if options.as_published:
        script.print_report("evaluate_policies", as_published(options.records[0], 10_000), options.out)
        return
    import_plugins()
    records = read(options.records)
    boards = {"as recorded": replay_policies(records, num_folds=options.folds)}
    if options.stress:
        boards |= stress(records, options.folds)
    for name, board in boards.items():
        print(f"\n{name}: {board.table()}")
    first = next(iter(boards))
    reports = {name: compact(board, [ALL, *(board.tasks if name == first else ())]) for name, board in boards.items()}
    script.print_report("evaluate_policies", {"baseline": BASELINE, "boards": reports}, options.out)


if __name__ == "__main__":
    script.run(main)
