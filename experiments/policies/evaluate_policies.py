"""Which gamma policy gives most tokens per second? Scored by greedy replay, on prompts no policy was tuned on.

RECORDS are .jsonl files that `records=` of generate wrote (greedy runs of the same prompts at several fixed gammas),
or the profile of the embedded pair, experiments/results/profile.parquet. Prompts are split into folds; what a policy
needs to know beforehand (the best fixed gamma, a threshold, trained predictors) comes from the training prompts.
Gains are paired, with bootstrap intervals over prompts, over the best fixed gamma chosen on training prompts. Regret is
tokens/s lost against the best any sequence of gammas could do.

--as-published instead repeats the SpecKV paper's own tables, from the folder of the authors' CSVs, beside the paper's
figures.

    python -m experiments.policies.evaluate_policies RECORDS...
    python -m experiments.policies.evaluate_policies CSV_FOLDER --as-published
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.bootstrap import ratio_interval
from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies import published, reproduce
from spec_stack.bench.oracles import best_fixed, oracle
from spec_stack.bench.replay import Costs, ReplayText, Score, fit_costs, merge_runs, replay
from spec_stack.bench.training import as_network, make_estimator, step_examples
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import Policy, StepRecord
from spec_stack.controller.predictor import Network
from spec_stack.controller.registry import POLICY_NAMES, make_policy
from spec_stack.controller.simple import Confidence, Fixed
from spec_stack.controller.speckv import SpecKV
from spec_stack.records import as_record, read_records

FIXED = (0, 1, 2, 4, 6, 8, 10, 12, 16)
THRESHOLDS = tuple(number / 20 for number in range(2, 20))
Maker = Callable[[], Policy]
Scores = dict[str, dict[str, dict[str, Score]]]
"""By policy, precision and prompt."""


@dataclass
class Data:
    """The records. note: how well the runs agree."""

    texts: list[ReplayText]
    records: list[StepRecord]
    costs: Mapping[str, Costs]
    note: str

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(text.precision for text in self.texts))


def read(path: Path) -> list[StepRecord]:
    """The records of a .jsonl file, or of a .parquet file with the same fields for columns."""
    if path.suffix != ".parquet":
        return read_records(path)
    from pyarrow import parquet

    table = parquet.read_table(path)
    # The shipped profile has a column of an earlier version.
    rows = table.drop_columns([name for name in table.column_names if name == "lag"]).to_pylist()
    return [as_record(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def load(paths: Sequence[Path]) -> Data:
    """The texts behind records, and what their steps cost."""
    records = [record for path in paths for record in read(path)]
    merged = merge_runs(records)
    note = (
        f"{len(merged.texts)} texts, {merged.num_positions} positions, {merged.num_unknown} never drafted, "
        f"{merged.num_unanimous / max(merged.num_shared, 1):.1%} of {merged.num_shared} shared ones unanimous"
    )
    return Data(merged.texts, records, fit_costs(records), note)


def split(texts: list[ReplayText], num_folds: int) -> dict[str, int]:
    """Fold of every prompt, tasks spread evenly; a prompt is in one fold at every precision."""
    folds: dict[str, int] = {}
    per_task: dict[str, int] = defaultdict(int)
    for text in texts:
        if text.prompt not in folds:
            folds[text.prompt] = per_task[text.task] % num_folds
            per_task[text.task] += 1
    return folds


def policies_for(train: list[ReplayText], precision: str, costs: Costs, trained: Network) -> dict[str, Maker]:
    """Every policy for a precision, with what it may know from these training prompts of the precision."""

    def tokens_per_s(threshold: float) -> float:
        return rate([replay(text, Confidence(threshold), costs) for text in train])

    makers: dict[str, Maker] = {f"fixed-{gamma}": partial(make_policy, "fixed", gamma=gamma) for gamma in FIXED}
    makers |= {name: partial(make_policy, name) for name in POLICY_NAMES if name != "fixed"}
    makers["best-fixed"] = partial(Fixed, best_fixed(train, {precision: costs})[precision])
    # The simple rival at its best.
    makers["confidence tuned"] = partial(Confidence, max(THRESHOLDS, key=tokens_per_s))
    makers["speckv mlp-16"] = partial(SpecKV, predictor=trained)
    makers["speckv mlp-16, as published"] = partial(SpecKV, predictor=trained, objective="per_step")
    return makers


def evaluate(data: Data, num_folds: int, max_gamma: int) -> Scores:
    """Run every policy on every prompt, in the fold that leaves the prompt out of what it knows."""
    folds = split(data.texts, num_folds)
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for fold in range(num_folds):
        inputs, rates, _ = step_examples([record for record in data.records if folds[record.request_id] != fold])
        trained = as_network(make_estimator("mlp-16").fit(inputs, rates))
        for precision in data.precisions:
            costs, own = data.costs[precision], [text for text in data.texts if text.precision == precision]
            tests = [text for text in own if folds[text.prompt] == fold]
            train = [text for text in own if folds[text.prompt] != fold]
            for name, make in policies_for(train, precision, costs, trained).items():
                policy = make()
                for text in tests:
                    scores[name][precision][text.prompt] = replay(text, policy, costs, max_gamma=max_gamma)
            for text in tests:
                scores["oracle"][precision][text.prompt] = oracle(text, costs, max_gamma=max_gamma)
    return scores


def rate(scores: list[Score]) -> float:
    """Tokens/s over all of them."""
    return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)


def gain(mine: dict[str, Score], base: dict[str, Score], seed: int) -> list[float]:
    """Relative gain in tokens/s over `base`, with its interval over prompts; a prompt's tokens are the same in both."""
    over = ratio_interval([base[prompt].seconds for prompt in base], [mine[prompt].seconds for prompt in base], seed)
    return [each - 1 for each in over]


def summarise(data: Data, scores: Scores, seed: int) -> dict[str, dict[str, Any]]:
    """Per precision and policy: tokens/s, tokens/step, mean gamma, gain over the best fixed gamma, regret."""
    summary: dict[str, dict[str, Any]] = {}
    for precision in data.precisions:
        own = {name: by_precision[precision] for name, by_precision in scores.items()}
        ceiling = rate(list(own["oracle"].values()))
        rows: dict[str, Any] = {}
        for name, mine in own.items():
            done = list(mine.values())
            num_steps = sum(score.num_steps for score in done)
            rows[name] = {
                "tokens_per_s": rate(done),
                "tokens_per_step": sum(score.num_tokens for score in done) / num_steps,
                "mean_gamma": sum(sum(score.gammas) for score in done) / num_steps,
                "regret_oracle": 1 - rate(done) / ceiling,
                "gain": gain(mine, own["best-fixed"], seed),
            }
        summary[precision] = rows
    return summary


def print_summary(summary: dict[str, dict[str, Any]]) -> None:
    for precision, rows in summary.items():
        print(f"\n{precision}: tokens/s by replay; gain over best-fixed (chosen on train), 95 % intervals over prompts")
        head = f"{'policy':28s} {'tok/s':>7s} {'tok/step':>8s} {'gamma':>6s} {'gain':>7s}"
        print(f"{head} {'interval':>16s} {'< oracle':>8s}")
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens_per_s"]):
            middle, *ends = row["gain"]
            gains = "[{:+.1%}, {:+.1%}]".format(*ends)
            line = f"{name:28s} {row['tokens_per_s']:7.2f} {row['tokens_per_step']:8.2f}"
            print(f"{line} {row['mean_gamma']:6.2f} {middle:+7.1%} {gains:>16s} {row['regret_oracle']:8.1%}")


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
    data = load(options.records)
    print(data.note)
    scores = evaluate(data, options.folds, options.max_gamma)
    summary = summarise(data, scores, options.seed)
    print_summary(summary)
    print_report({**header, "summary": summary}, options.out)


if __name__ == "__main__":
    run_script(main)
