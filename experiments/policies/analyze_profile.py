"""Analyze a profile: the best gamma per task and precision, what signals foretell, what moves the optimum.

RECORDS is a file of profile_steps.py. Four tables, each by precision:
1. The fixed gamma with most tokens/s per task (the SpecKV paper's Table 1), and the share of bootstrap resamples of the
   prompts in which each gamma is the best.
2. Correlation of a step's signals with its acceptance rate (Table 2), with an interval over prompts.
3. What a step costs and what is accepted, and the best gamma that every precision's acceptance would have at every
   precision's costs, by replay: along a row only acceptance changes, down a column only costs.
4. Greedy output with speculation against without: how many runs differ, and whether at ties.
Times are those of the decode steps (draft, target and policy; not the loop around them). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.script import run_script
from spec_stack.controller.base import StepRecord
from spec_stack.controller.registry import make_policy
from spec_stack.hf.precision import TIE_TOLERANCE
from spec_stack.offline.records import read_records
from spec_stack.offline.replay import fit_costs, merge_runs, replay

SIGNALS = ("mean_entropy", "max_entropy", "mean_confidence", "min_confidence")
NUM_RESAMPLES = 2000
Table = dict[int, dict[str, tuple[int, float]]]


def is_timed(record: StepRecord) -> bool:
    """Tell whether no model prefilled the prompt in the step."""
    return not record.is_prefill and not record.draft_read_prompt


def fixed_runs(records: list[StepRecord], precision: str, task: str = "all") -> Table:
    """Tokens and seconds of the decode steps, by gamma and prompt."""
    table: Table = {}
    for record in records:
        if record.precision != precision or task not in ("all", record.task) or not record.policy.startswith("fixed-"):
            continue
        by_prompt = table.setdefault(int(record.policy.removeprefix("fixed-")), {})
        tokens, seconds = by_prompt.get(record.request_id, (0, 0.0))
        if is_timed(record):
            spent = record.draft_s + record.verify_s + record.controller_s
            by_prompt[record.request_id] = tokens + record.num_tokens, seconds + spent
    return table


def best_gamma(table: Table, seed: int = 0) -> tuple[int, dict[int, float], dict[int, float]]:
    """The gamma with most tokens/s, every gamma's tokens/s, and the share of resamples in which it is the best."""
    gammas, prompts = sorted(table), sorted(next(iter(table.values())))
    counts = np.array([[table[gamma][prompt] for prompt in prompts] for gamma in gammas])
    picks = np.random.default_rng(seed).integers(len(prompts), size=(NUM_RESAMPLES, len(prompts)))
    sums = counts[:, picks].sum(axis=2)
    winners = Counter(np.argmax(sums[..., 0] / sums[..., 1], axis=0).tolist())
    totals = counts.sum(axis=1)
    speeds = {gamma: float(tokens / seconds) for gamma, (tokens, seconds) in zip(gammas, totals, strict=True)}
    shares = {gamma: winners[index] / NUM_RESAMPLES for index, gamma in enumerate(gammas) if winners[index]}
    return max(gammas, key=speeds.__getitem__), speeds, shares


def correlations(records: list[StepRecord], precision: str, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Correlate each signal with the acceptance rate, over steps, with a 95 % interval over prompts."""
    steps = [r for r in records if r.precision == precision and r.gamma and not r.is_prefill]
    rates = np.array([record.num_accepted / record.gamma for record in steps])
    prompts = sorted({record.request_id for record in steps})
    rows = [np.flatnonzero([record.request_id == prompt for record in steps]) for prompt in prompts]
    rng = np.random.default_rng(seed)
    resamples = [
        np.concatenate([rows[index] for index in rng.integers(len(prompts), size=len(prompts))]) for _ in range(500)
    ]
    result = {}
    for name in SIGNALS:
        values = np.array([getattr(record.signals, name) for record in steps])
        drawn = [np.corrcoef(values[picked], rates[picked])[0, 1] for picked in resamples]
        low, high = np.percentile(drawn, [2.5, 97.5])
        result[name] = float(np.corrcoef(values, rates)[0, 1]), float(low), float(high)
    return result


def show_best(records: list[StepRecord], precisions: list[str], tasks: list[str]) -> dict[str, Any]:
    print("best fixed gamma by tokens/s of the decode steps; share of resamples of the prompts that each gamma wins")
    print(f"{'':6s}{'task':14s}{'best':>5s}{'tokens/s':>10s}{'over gamma 0':>14s}   shares")
    result: dict[str, Any] = {}
    for precision in precisions:
        result[precision] = {}
        for task in tasks:
            best, speeds, shares = best_gamma(fixed_runs(records, precision, task))
            gain = speeds[best] / speeds[0] if 0 in speeds else None
            shown = ", ".join(f"{gamma}: {share:.0%}" for gamma, share in sorted(shares.items(), key=lambda i: -i[1]))
            over = "–" if gain is None else f"{gain:.2f}x"
            print(f"{precision:6s}{task:14s}{best:5d}{speeds[best]:10.1f}{over:>14s}   {shown}")
            result[precision][task] = {"best": best, "tokens_per_s": speeds, "shares": shares}
    return result


def show_correlations(records: list[StepRecord], precisions: list[str]) -> dict[str, Any]:
    print("\ncorrelation of a step's signals with its acceptance rate [95 % over prompts]")
    print(f"{'':6s}" + "".join(f"{name:>26s}" for name in SIGNALS))
    result = {}
    for precision in precisions:
        result[precision] = found = correlations(records, precision)
        print(f"{precision:6s}" + "".join(f"{v:>+10.3f} [{low:+.2f}, {high:+.2f}]" for v, low, high in found.values()))
    return result


def show_causes(records: list[StepRecord], precisions: list[str], gammas: list[int]) -> dict[str, Any]:
    costs = fit_costs([record for record in records if is_timed(record)])
    texts = merge_runs(records).texts
    largest = max(gammas)
    print("\nwhat a step costs, and what is accepted")
    print(f"{'':6s}{'plain ms':>9s}{'draft ms/token':>15s}{'verify ms/token':>16s}{'a token over plain':>19s}", end="")
    print("".join(f"{f'accepted of {gamma}':>15s}" for gamma in gammas if gamma))
    result: dict[str, Any] = {"costs": {}, "best_gamma": {}}
    for precision in precisions:
        cost = costs[precision]
        plain, drafts = cost.verify_s(0), cost.draft_s(largest) / largest
        verifies = (cost.verify_s(largest) - plain) / largest
        accepted = {
            gamma: float(np.mean([r.num_accepted for r in records if is_timed(r) and _is_full(r, precision, gamma)]))
            for gamma in gammas
            if gamma
        }
        ratio = (drafts + verifies) / plain
        print(f"{precision:6s}{plain * 1e3:9.2f}{drafts * 1e3:15.3f}{verifies * 1e3:16.3f}{ratio:19.3f}", end="")
        print("".join(f"{value:15.2f}" for value in accepted.values()))
        result["costs"][precision] = {
            "plain_ms": plain * 1e3,
            "draft_ms_per_token": drafts * 1e3,
            "verify_ms_per_token": verifies * 1e3,
            "token_over_plain": ratio,
            "accepted": accepted,
        }
    print("\nbest gamma by replay: costs of the row, acceptance of the column")
    print(f"{'':6s}" + "".join(f"{precision:>8s}" for precision in precisions))
    for row in precisions:
        best = {}
        for column in precisions:
            mine = [text for text in texts if text.precision == column]
            speeds = {}
            for gamma in gammas:
                scores = [replay(text, make_policy("fixed", gamma=gamma), costs[row]) for text in mine]
                speeds[gamma] = sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)
            best[column] = max(gammas, key=speeds.__getitem__)
        result["best_gamma"][row] = best
        print(f"{row:6s}" + "".join(f"{gamma:8d}" for gamma in best.values()))
    first, *others = precisions
    table = result["best_gamma"]
    for other in others:
        print(
            f"  {first} -> {other}: {table[first][first]} -> {table[other][other]}; "
            f"with the costs of {other} alone {table[other][first]}, with its acceptance alone {table[first][other]}"
        )
    return result


def _is_full(record: StepRecord, precision: str, gamma: int) -> bool:
    return record.precision == precision and record.policy == f"fixed-{gamma}" and record.gamma == gamma


def show_greedy(path: Path, precisions: list[str], records: list[StepRecord]) -> dict[str, Any]:
    state = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    print("\nruns whose tokens differ from plain decoding's at the same precision")
    print(f"{'':6s}{'runs':>6s}{'differ':>8s}{'at a tie':>10s}{'tolerance':>11s}{'largest gap':>13s}")
    result = {}
    for precision in precisions:
        runs = {(r.request_id, r.policy) for r in records if r.precision == precision and r.policy != "fixed-0"}
        gaps = [abs(each["gap"]) for each in state["differences"] if each["precision"] == precision]
        tolerance = TIE_TOLERANCE[precision]
        ties = sum(gap <= tolerance for gap in gaps)
        largest = max(gaps, default=0.0)
        print(f"{precision:6s}{len(runs):6d}{len(gaps):8d}{ties:10d}{tolerance:11.3f}{largest:13.4f}")
        result[precision] = {
            "runs": len(runs),
            "differ": len(gaps),
            "at_a_tie": ties,
            "tolerance": tolerance,
            "largest_gap": largest,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="a file of profile_steps.py, its .json file beside it")
    arguments = parser.parse_args()
    records = read_records(arguments.records)
    precisions = list(dict.fromkeys(record.precision for record in records))
    tasks = [*dict.fromkeys(record.task for record in records), "all"]
    gammas = sorted({gamma for precision in precisions for gamma in fixed_runs(records, precision)})
    if len(gammas) < 2:
        raise ValueError(f"{arguments.records} holds runs at fixed gammas {gammas}; two or more are needed")
    result = {
        "table_1": show_best(records, precisions, tasks),
        "table_2": show_correlations(records, precisions),
        "causes": show_causes(records, precisions, gammas),
        "greedy": show_greedy(arguments.records, precisions, records),
    }
    print(json.dumps({"experiment": "analyze_profile", **describe(), **result}))


if __name__ == "__main__":
    run_script(main)
