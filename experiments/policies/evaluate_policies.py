"""Which gamma policy gives most tokens per second? Scored by greedy replay, on prompts no policy was tuned on.

RECORDS are files written by spec_stack.offline.records (greedy runs of the same prompts at several fixed gammas), or
the folder of the SpecKV authors' CSVs. Prompts are split into folds; what a policy needs to know beforehand (the best
fixed gamma, the task oracle, trained predictors, the warm start of learning policies) comes from the training prompts.
Intervals are bootstrapped over prompts. Gains are paired, over three rivals: the best fixed gamma chosen on training
prompts, the best one in hindsight, and `confidence` with the threshold that was best on training prompts. Regret is
tokens/s lost against the best any sequence of gammas could do. --worlds repeats all of it with other drawn signals
where the authors' data leave them open, and prints the mean of the gains and their range.

--as-published instead repeats the SpecKV paper's own tables from the authors' CSVs, beside the paper's figures.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies import published, reproduce
from experiments.policies.published_columns import StepTable
from experiments.policies.rivals.bandit import Bandit
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.predictor import Card, StepPredictor
from spec_stack.controller.registry import POLICY_NAMES, make_policy
from spec_stack.controller.simple import Confidence
from spec_stack.controller.speckv import SpecKV
from spec_stack.offline.oracles import BestFixed, TaskOracle, best_fixed, oracle
from spec_stack.offline.records import read_records
from spec_stack.offline.replay import Costs, Merged, ReplayText, Score, fit_costs, merge_runs, replay
from spec_stack.offline.training import as_network, make_estimator, step_examples

FIXED = (0, 1, 2, 4, 6, 8, 10, 12, 16)
THRESHOLDS = tuple(number / 20 for number in range(2, 20))
LEARNING = ("throughput", "bandit", "speckv")


@dataclass
class Data:
    """The records; reserve as in `replay`. measured: tokens/s of the runs themselves, (precision, gamma).
    table: the authors' step file, where it is theirs."""

    texts: list[ReplayText]
    records: list[StepRecord]
    costs: Mapping[str, Costs]
    measured: dict[tuple[str, int], float]
    reserve: int
    table: StepTable | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(text.precision for text in self.texts))


class Timed(Policy):
    """A policy whose own calls are timed: seconds in all of them, and the number of decisions."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self._policy = policy
        self.seconds = 0.0
        self.num_decisions = 0

    def choose(self, context: StepContext) -> int:
        self.num_decisions += 1
        began = perf_counter()
        gamma = self._policy.choose(context)
        self.seconds += perf_counter() - began
        return gamma

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        self.num_decisions += 1
        began = perf_counter()
        answer = self._policy.keep_drafting(context, signals)
        self.seconds += perf_counter() - began
        return answer

    def observe(self, record: StepRecord) -> None:
        began = perf_counter()
        self._policy.observe(record)
        self.seconds += perf_counter() - began


def load(paths: list[Path], seed: int = 0) -> Data:
    """Read records of ours, or the authors' folder."""
    if published.is_published(paths):
        data = published.load(paths[0], seed)
        merged = merge_runs(data.records)
        measured: dict[tuple[str, int], float] = {}
        for precision in data.costs:
            for gamma in reproduce.GAMMAS:
                runs = [run for run in data.runs if (run.precision, run.gamma) == (precision, gamma)]
                measured[precision, gamma] = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
        notes = [
            "times fitted from whole runs (a per step, b per drafted token): "
            + ", ".join(
                f"{name} a={1e3 * cost.verify_base_s:.1f} b={1e3 * cost.draft_per_token_s:.1f} ms "
                f"R2={data.cost_r2[name]:.4f}"
                for name, cost in data.costs.items()
            ),
            "signals per token recovered from step aggregates; determined: "
            + ", ".join(f"{name} {share:.0%}" for name, share in data.determined.items()),
        ]
        return Data(merged.texts, data.records, data.costs, measured, 0, data.table, [*notes, _agreement(merged)])
    records = read_records(*paths)
    merged, measured = merge_runs(records), {}
    groups: dict[tuple[str, int], list[StepRecord]] = defaultdict(list)
    for record in records:
        if record.policy.startswith("fixed-") and not record.is_prefill:
            groups[record.precision, int(record.policy.removeprefix("fixed-"))].append(record)
    for key, group in groups.items():
        seconds = sum(record.draft_s + record.verify_s for record in group)
        measured[key] = sum(record.num_tokens for record in group) / seconds
    return Data(merged.texts, records, fit_costs(records), measured, 1, notes=[_agreement(merged)])


def _agreement(merged: Merged) -> str:
    return (
        f"{len(merged.texts)} texts, {merged.num_positions} positions, {merged.num_unknown} never drafted, "
        f"{merged.num_unanimous / max(merged.num_shared, 1):.1%} of {merged.num_shared} shared ones unanimous"
    )


def split(texts: list[ReplayText], num_folds: int) -> dict[str, int]:
    """Fold of every prompt, tasks spread evenly; a prompt is in one fold at every precision."""
    folds: dict[str, int] = {}
    per_task: dict[str, int] = defaultdict(int)
    for text in texts:
        if text.prompt not in folds:
            folds[text.prompt] = per_task[text.task] % num_folds
            per_task[text.task] += 1
    return folds


Maker = Callable[[], Policy]


def policies_for(train: list[ReplayText], records: list[StepRecord], data: Data) -> dict[str, Maker]:
    """Every policy, with what it may know from the training prompts of all precisions."""
    best = best_fixed(train, data.costs, reserve=data.reserve)
    by_task = {
        (precision, task): gamma
        for task in {text.task for text in train}
        for precision, gamma in best_fixed(
            [text for text in train if text.task == task], data.costs, reserve=data.reserve
        ).items()
    }
    makers: dict[str, Maker] = {f"fixed-{gamma}": partial(make_policy, "fixed", gamma=gamma) for gamma in FIXED}
    makers["best-fixed"] = partial(BestFixed, best)
    for name in POLICY_NAMES:
        if name != "fixed":
            makers[name] = partial(make_policy, name)
    makers["task-oracle"] = partial(TaskOracle, by_task)
    inputs, rates, _ = step_examples(records)
    for model in ("ridge", "mlp-16"):
        step_model = StepPredictor(as_network(make_estimator(model).fit(inputs, rates)), _CARD)
        makers[f"speckv {model}"] = partial(SpecKV, predictor=step_model)
        makers[f"speckv {model}, as published"] = partial(SpecKV, predictor=step_model, objective="per_step")
    makers["bandit"] = Bandit
    makers["confidence tuned"] = partial(ByPrecision, tuned_confidence(train, data))
    return makers


class ByPrecision(Policy):
    """A confidence threshold for every precision."""

    name = "confidence tuned"

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._policies = {name: Confidence(threshold) for name, threshold in thresholds.items()}

    def choose(self, context: StepContext) -> int:
        return self._policies[context.precision].choose(context)

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return self._policies[context.precision].keep_drafting(context, signals)


def tuned_confidence(train: list[ReplayText], data: Data) -> dict[str, float]:
    """The threshold with most tokens/s on training prompts, by precision: the simple rival at its best."""
    best = {}
    for precision in dict.fromkeys(text.precision for text in train):
        texts = [text for text in train if text.precision == precision]
        rates = {
            threshold: rate(
                [replay(text, Confidence(threshold), data.costs[precision], reserve=data.reserve) for text in texts]
            )
            for threshold in THRESHOLDS
        }
        best[precision] = max(rates, key=rates.__getitem__)
    return best


_CARD = Card("step", "fold", (), "", 0, 0)


@dataclass
class Results:
    """scores[policy][precision][prompt], and microseconds per decision by policy."""

    scores: dict[str, dict[str, dict[str, Score]]]
    decision_us: dict[str, float]


def evaluate(data: Data, num_folds: int, max_gamma: int) -> Results:
    """Run every policy on every prompt, in the fold that leaves the prompt out of what it knows."""
    folds = split(data.texts, num_folds)
    scores: dict[str, dict[str, dict[str, Score]]] = defaultdict(lambda: defaultdict(dict))
    seconds: dict[str, float] = defaultdict(float)
    decisions: dict[str, int] = defaultdict(int)
    for fold in range(num_folds):
        train = [text for text in data.texts if folds[text.prompt] != fold]
        records = [record for record in data.records if folds[record.request_id] != fold]
        makers = policies_for(train, records, data)
        for precision in data.precisions:
            costs = data.costs[precision]
            tests = [text for text in data.texts if folds[text.prompt] == fold and text.precision == precision]
            for name, make in makers.items():
                starts = [(name, False)] + ([(f"{name} warm", True)] if name in LEARNING else [])
                for label, warm in starts:
                    policy = Timed(make())
                    for text in (text for text in train if warm and text.precision == precision):
                        replay(text, policy, costs, max_gamma=max_gamma, reserve=data.reserve)
                    for text in tests:
                        scores[label][precision][text.prompt] = replay(
                            text, policy, costs, max_gamma=max_gamma, reserve=data.reserve
                        )
                    seconds[label] += policy.seconds
                    decisions[label] += policy.num_decisions
            for text in tests:
                scores["oracle"][precision][text.prompt] = oracle(
                    text, costs, max_gamma=max_gamma, reserve=data.reserve
                )
    return Results(scores, {name: 1e6 * seconds[name] / decisions[name] for name in seconds})


def rate(scores: list[Score]) -> float:
    return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)


def gain_interval(
    mine: dict[str, Score], base: dict[str, Score], num_resamples: int, seed: int
) -> tuple[float, float, float]:
    """Relative gain in tokens/s over `base`, with its 95 % interval, resampling prompts."""
    rng = np.random.default_rng(seed)
    table = np.array(
        [
            (mine[prompt].num_tokens, mine[prompt].seconds, base[prompt].num_tokens, base[prompt].seconds)
            for prompt in base
        ]
    )
    total = table.sum(axis=0)
    point = (total[0] / total[1]) / (total[2] / total[3]) - 1
    sums = table[rng.integers(0, len(table), (num_resamples, len(table)))].sum(axis=1)
    gains = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1
    low, high = np.percentile(gains, [2.5, 97.5])
    return float(point), float(low), float(high)


def rate_interval(mine: dict[str, Score], num_resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of tokens/s, resampling prompts."""
    rng = np.random.default_rng(seed)
    table = np.array([(score.num_tokens, score.seconds) for score in mine.values()])
    sums = table[rng.integers(0, len(table), (num_resamples, len(table)))].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return float(low), float(high)


def summarise(data: Data, results: Results, num_resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Per precision and policy: tokens/s, interval, tokens/step, mean gamma, gain over best fixed, regrets."""
    summary: dict[str, dict[str, Any]] = {}
    for precision in data.precisions:
        best = results.scores["best-fixed"][precision]
        hindsight = max(
            (results.scores[f"fixed-{gamma}"][precision] for gamma in FIXED), key=lambda each: rate(list(each.values()))
        )
        tuned = results.scores["confidence tuned"][precision]
        ceiling = rate(list(results.scores["oracle"][precision].values()))
        rows: dict[str, Any] = {}
        for name, by_precision in results.scores.items():
            mine = by_precision[precision]
            tokens_per_s = rate(list(mine.values()))
            num_steps = sum(score.num_steps for score in mine.values())
            gain, low, high = gain_interval(mine, best, num_resamples, seed)
            rows[name] = {
                "tokens_per_s": tokens_per_s,
                "interval": rate_interval(mine, num_resamples, seed),
                "tokens_per_step": sum(score.num_tokens for score in mine.values()) / num_steps,
                "mean_gamma": sum(sum(score.gammas) for score in mine.values()) / num_steps,
                "gain": gain,
                "gain_interval": (low, high),
                "gain_over_hindsight": gain_interval(mine, hindsight, num_resamples, seed),
                "gain_over_tuned_confidence": gain_interval(mine, tuned, num_resamples, seed),
                "regret_oracle": 1 - tokens_per_s / ceiling,
            }
        summary[precision] = rows
    return summary


def print_summary(summary: dict[str, dict[str, Any]], decision_us: dict[str, float], timing: bool) -> None:
    for precision, rows in summary.items():
        print(f"\n{precision}: tokens/s by replay, 95 % intervals over prompts; gain over best-fixed (chosen on train)")
        head = f"{'policy':22s} {'tok/s':>7s} {'interval':>15s} {'tok/step':>8s} {'gamma':>6s} {'gain':>7s}"
        print(f"{head} {'interval':>16s} {'< oracle':>8s}" + (f" {'µs/decision':>11s}" if timing else ""))
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens_per_s"]):
            interval = "[{:.1f}, {:.1f}]".format(*row["interval"])
            gains = "[{:+.1%}, {:+.1%}]".format(*row["gain_interval"])
            line = f"{name:22s} {row['tokens_per_s']:7.2f} {interval:>15s} {row['tokens_per_step']:8.2f}"
            line += f" {row['mean_gamma']:6.2f} {row['gain']:+7.1%} {gains:>16s} {row['regret_oracle']:8.1%}"
            if timing:
                line += f" {decision_us[name]:11.2f}" if name in decision_us else f" {'-':>11s}"
            print(line)


def over_worlds(summaries: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Print the mean gain and its range over drawn worlds; the same as plain values."""
    result: dict[str, Any] = {}
    print(f"\n{len(summaries)} worlds: mean gain [least, most] over best fixed (train, hindsight), tuned confidence")
    for precision, rows in summaries[0].items():
        result[precision] = {}
        for name in rows:
            mine = [summary[precision][name] for summary in summaries]
            gains = {
                "train": [row["gain"] for row in mine],
                "hindsight": [row["gain_over_hindsight"][0] for row in mine],
                "tuned_confidence": [row["gain_over_tuned_confidence"][0] for row in mine],
            }
            shown = {key: (float(np.mean(values)), min(values), max(values)) for key, values in gains.items()}
            result[precision][name] = shown
            cells = "  ".join(f"{mean:+6.1%} [{low:+.1%}, {high:+.1%}]" for mean, low, high in shown.values())
            print(f"  {precision:5s} {name:24s} {cells}")
    return result


def check_replay(data: Data) -> dict[str, float]:
    """Replay of the recorded fixed gammas against the tokens/s those runs measured."""
    errors = {}
    print("\nreplay of fixed gammas against the runs themselves, tokens/s")
    for (precision, gamma), measured in data.measured.items():
        policy = make_policy("fixed", gamma=gamma)
        costs = data.costs[precision]
        texts = [text for text in data.texts if text.precision == precision]
        replayed = rate([replay(text, policy, costs, reserve=data.reserve) for text in texts])
        errors[f"{precision} {gamma}"] = replayed / measured - 1
        figures = f"measured {measured:7.2f}  replayed {replayed:7.2f}  {replayed / measured - 1:+.2%}"
        print(f"  {precision:5s} fixed-{gamma}: {figures}")
    return errors


def as_published(folder: Path, num_resamples: int) -> dict[str, Any]:
    """Print the paper's tables beside ours."""
    data = published.load(folder)
    speeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in data.runs:
        # The authors' Table 1 averages the rounded tokens/s of runs; seconds and tokens give the same ranking.
        speeds[run.precision, run.task][run.gamma].append(run.num_tokens / run.seconds)
    oracle_gammas = {
        key: max(by_gamma, key=lambda gamma: float(np.mean(by_gamma[gamma]))) for key, by_gamma in speeds.items()
    }
    outcome = reproduce.reproduce(data.table, oracle_gammas, num_resamples)
    print(f"{'table':6s} {'cell':30s} {'paper':>10s} {'ours':>10s} {'difference':>10s}")
    for cell in outcome.cells:
        mark = "" if cell.within else "  <-- off"
        print(f"{cell.table:6s} {cell.name:30s} {cell.paper:10.3f} {cell.ours:10.3f} {cell.difference:+10.3f}{mark}")
    checked = [cell for cell in outcome.cells if cell.tolerance is not None]
    off = [cell.name for cell in checked if not cell.within]
    print(f"\n{len(checked) - len(off)} of {len(checked)} cells within tolerance")
    for name, shares in outcome.gamma_shares.items():
        print(f"SpecKV-fast picks, {name}: " + ", ".join(f"gamma {g} {share:.1%}" for g, share in shares.items()))
    observed = ", ".join(f"gamma {g} {value:.2f}" for g, value in outcome.observed_tokens_per_step.items())
    print(f"tokens/step really observed: {observed}")
    return {
        "cells": len(checked),
        "within": len(checked) - len(off),
        "off": off,
        "largest_difference": max(abs(cell.difference) for cell in checked),
        "improvement_over_fixed_4": outcome.improvement,
        "gamma_shares": outcome.gamma_shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="record files, or the authors' folder")
    parser.add_argument("--as-published", action="store_true", help="repeat the SpecKV paper's tables")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--max-gamma", type=int, default=MAX_GAMMA)
    parser.add_argument("--resamples", type=int, default=2000, help="bootstrap resamples (as published: 10000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the bootstrap, and of signals that the authors' data leave open"
    )
    parser.add_argument("--worlds", type=int, default=1, help="seeds from --seed on, averaged (%(default)s)")
    parser.add_argument("--timing", action="store_true", help="show microseconds per decision of every policy")
    add_out_argument(parser)
    options = parser.parse_args()
    if not 1 <= options.max_gamma <= MAX_GAMMA:
        parser.error(f"--max-gamma must be 1 to {MAX_GAMMA}, got {options.max_gamma}")
    if options.resamples < 1:
        parser.error(f"--resamples must be 1 or more, got {options.resamples}")
    header = {"experiment": "evaluate_policies", **describe()}
    if options.as_published:
        print_report({**header, **as_published(options.records[0], 10_000)}, options.out)
        return
    data = load(options.records, options.seed)
    print("\n".join(data.notes))
    errors = check_replay(data)
    results = evaluate(data, options.folds, options.max_gamma)
    summary = summarise(data, results, options.resamples, options.seed)
    print_summary(summary, results.decision_us, options.timing)
    line: dict[str, Any] = {**header, "replay_errors": errors, "summary": summary}
    if options.worlds > 1:
        others = [
            summarise(world, evaluate(world, options.folds, options.max_gamma), options.resamples, options.seed)
            for world in (load(options.records, options.seed + number) for number in range(1, options.worlds))
        ]
        line["worlds"] = over_worlds([summary, *others])
    if options.timing:
        line["decision_us"] = results.decision_us
    print_report(line, options.out)


if __name__ == "__main__":
    run_script(main)
