"""Judge policies and proposers on a pair's recorded texts, in a minute and without its models.

Asks: how fast is each policy on text that real models wrote, with the seconds that they take? Replays the texts of
`record_texts.py` through the library's own decode loop, policies, proposers and look-up gate (`simulated_pair.py`), in
shuffled mixed orders, one policy going from text to text as in a generator. Prints speed over plain decoding by
category, the default over its rivals with 95 % intervals (bootstrap over texts), then an edit and prose in one
generator; ends in one JSON line.

The confidence threshold is the best one for the texts of --tune, or, without it, for the other half of the texts; the
best fixed gamma is the best for the judged texts themselves, so it is flattered. The oracle knows which drafted tokens
are right.

    simulate_texts.py texts.jsonl --tune others.jsonl --ratios 0.1 0.25 0.45
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.policies.simulated_pair import Costs, Run, Text, oracle_s, read_texts, run_text, run_texts
from spec_stack.controller.base import Policy
from spec_stack.controller.lookup import LookupGate
from spec_stack.controller.registry import make_policy

# Milliseconds of a step of Qwen2.5-Coder 1.5B in bf16 on one core, by the tokens that it is fed.
QWEN_VERIFY_MS = "1:258,2:255,3:247,5:250,9:295,17:450"
GAMMAS = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NUM_DRAWS = 4000


@dataclass(frozen=True)
class Arm:
    """A policy, by what makes it, and a proposer."""

    make: Callable[[], Policy]
    proposer: str = "model"


def named(name: str, **options: object) -> Callable[[], Policy]:
    """Return what makes a policy of the registry."""
    return lambda: make_policy(name, **options)


ARMS = {
    **{f"fixed {gamma}": Arm(named("fixed", gamma=gamma)) for gamma in GAMMAS},
    "speckv": Arm(named("speckv")),
    "speckv, the paper's objective": Arm(named("speckv", objective="per_step")),
    "throughput": Arm(named("throughput")),
    "look-up": Arm(named("throughput"), "lookup"),
    "both": Arm(named("throughput"), "both"),
}


def seconds_of(texts: Sequence[Text], arm: Arm, costs: Costs, seeds: int) -> tuple[list[float], list[Run]]:
    """Seconds of every text, the mean over shuffled orders, and all runs."""
    seconds, runs = np.zeros(len(texts)), []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(texts))
        ran = run_texts([texts[at] for at in order], arm.make, arm.proposer, costs)
        for at, run in zip(order, ran, strict=True):
            seconds[at] += run.decode_s / seeds
        runs += ran
    return seconds.tolist(), runs


def tuned_threshold(texts: Sequence[Text], costs: Costs) -> float:
    """The confidence threshold that is fastest on these texts."""

    def total_s(threshold: float) -> float:
        return sum(seconds_of(texts, Arm(named("confidence", threshold=threshold)), costs, 1)[0])

    return min(THRESHOLDS, key=total_s)


def with_tuned_threshold(texts: Sequence[Text], tune: Sequence[Text], costs: Costs) -> tuple[list[float], list[float]]:
    """Seconds of every text under a threshold tuned elsewhere, and the thresholds that were used."""
    if tune:
        threshold = tuned_threshold(tune, costs)
        return seconds_of(texts, Arm(named("confidence", threshold=threshold)), costs, 1)[0], [threshold]
    halves = [list(range(start, len(texts), 2)) for start in (0, 1)]
    seconds, used = [0.0] * len(texts), []
    for judged, other in (halves, halves[::-1]):
        used.append(tuned_threshold([texts[at] for at in other], costs))
        arm = Arm(named("confidence", threshold=used[-1]))
        for at, found in zip(judged, seconds_of([texts[at] for at in judged], arm, costs, 1)[0], strict=True):
            seconds[at] = found
    return seconds, used


def gain(seconds: Sequence[float], rival: Sequence[float], where: Sequence[int]) -> list[float]:
    """How much faster than a rival, as a share: estimate, and 95 % interval of a bootstrap over texts."""
    own, other = np.array(seconds)[where], np.array(rival)[where]
    draws = np.random.default_rng(0).integers(len(own), size=(NUM_DRAWS, len(own)))
    ratios = other[draws].sum(1) / own[draws].sum(1) - 1
    return [float(other.sum() / own.sum() - 1), *np.percentile(ratios, [2.5, 97.5]).tolist()]


def step_counts(runs: Sequence[Run]) -> dict[str, float]:
    """How the decode steps of some runs went, pooled."""
    steps = [step for run in runs for step in run.steps]
    drafted, looked_up = sum(s.num_drafted for s in steps), sum(s.num_looked_up for s in steps)
    right = sum(s.num_drafted_accepted for s in steps)
    return {
        "tokens_per_step": sum(s.num_tokens for s in steps) / len(steps),
        "drafted_per_step": drafted / len(steps),
        "drafted_accepted": right / max(drafted, 1),
        "idle": sum(s.gamma == 0 for s in steps) / len(steps),
        "looked_up_per_step": looked_up / len(steps),
        "looked_up_accepted": (sum(s.num_accepted for s in steps) - right) / max(looked_up, 1),
    }


def compare(texts: Sequence[Text], tune: Sequence[Text], costs: Costs, seeds: int) -> dict[str, object]:
    """All arms over the texts: prints a table and the default's gains, and gives what it printed."""
    tasks = list(dict.fromkeys(text.task for text in texts))
    places = {task: [at for at, text in enumerate(texts) if text.task == task] for task in tasks}
    places["all"] = list(range(len(texts)))
    seconds: dict[str, list[float]] = {"plain": seconds_of(texts, Arm(named("fixed", gamma=0)), costs, 1)[0]}
    counts = {}
    for name, arm in ARMS.items():
        seconds[name], runs = seconds_of(texts, arm, costs, seeds)
        counts[name] = step_counts(runs)
    seconds["confidence, tuned"], thresholds = with_tuned_threshold(texts, tune, costs)
    seconds["oracle"] = [oracle_s(text, costs) for text in texts]
    print("speed over plain".ljust(32) + "".join(task.rjust(9) for task in places))
    speeds = {}
    for name, of_texts in seconds.items():
        speeds[name] = {task: 1 + gain(of_texts, seconds["plain"], where)[0] for task, where in places.items()}
        told = "".join(f"{speed:9.2f}" for speed in speeds[name].values())
        print(name.ljust(32) + told + _told(counts.get(name)), flush=True)
    fixed = {task: max((f"fixed {gamma}" for gamma in GAMMAS), key=lambda name: speeds[name][task]) for task in places}
    gains: dict[str, dict[str, list[float]]] = {}
    for own, rival in (
        ("throughput", "plain"),
        ("throughput", "best fixed"),
        ("throughput", "confidence, tuned"),
        ("both", "plain"),
        ("both", "throughput"),
        ("both", "look-up"),
    ):
        for task, where in places.items():
            other = seconds[fixed[task] if rival == "best fixed" else rival]
            gains.setdefault(f"{own} over {rival}", {})[task] = gain(seconds[own], other, where)
    print(f"thresholds tuned on other texts: {thresholds}; best fixed: {fixed}")
    for name, by_task in gains.items():
        told = "  ".join(
            f"{task} {100 * g:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" for task, (g, low, high) in by_task.items()
        )
        print(f"{name}, %: {told}")
    return {"speeds": speeds, "gains": gains, "steps": counts, "thresholds": thresholds, "best_fixed": fixed}


def _told(counts: dict[str, float] | None) -> str:
    if counts is None:
        return ""
    return (
        "   {tokens_per_step:.2f} tokens a step, {drafted_per_step:.2f} drafted ({drafted_accepted:.2f} right), "
        "{looked_up_per_step:.2f} looked up ({looked_up_accepted:.2f}), idle {idle:.2f}"
    ).format(**counts)


def copy_then_prose(texts: Sequence[Text], costs: Costs) -> dict[str, float]:
    """Measure what a text loses by coming after one that copies: over all of copying texts and others, in pairs.

    Returns
    -------
    dict
        speed: of the second text over the same on a fresh generator. speed_over_plain: its own. idle: its steps that
        proposed nothing. gain_of_fixed_2: over plain, of the same texts.
    """
    copying = sorted(texts, key=_copied)[-5:]
    others = [text for text in texts if text not in copying and _copied(text) < 0.5]
    arm, after, fresh, plain, fixed, steps = ARMS["both"], 0.0, 0.0, 0.0, 0.0, []
    for other in others:
        plain += run_texts([other], named("fixed", gamma=0), "model", costs)[0].decode_s * len(copying)
        fixed += run_texts([other], named("fixed", gamma=2), "model", costs)[0].decode_s * len(copying)
        fresh += run_texts([other], arm.make, arm.proposer, costs)[0].decode_s * len(copying)
        for copy in copying:
            policy, gate = arm.make(), LookupGate()
            run_text(copy, policy, arm.proposer, gate, costs)
            second = run_text(other, policy, arm.proposer, gate, costs)
            after += second.decode_s
            steps += second.steps
    idle = sum(step.gamma == 0 for step in steps) / len(steps)
    return {
        "speed": fresh / after,
        "speed_over_plain": plain / after,
        "idle": idle,
        "gain_of_fixed_2": plain / fixed - 1,
    }


def _copied(text: Text) -> float:
    """The share of a text's runs of eight tokens that its prompt has too."""
    ids, size = text.prompt_ids, 8
    known = {tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)}
    runs = [tuple(text.text_ids[at : at + size]) for at in range(len(text.text_ids) - size + 1)]
    return sum(run in known for run in runs) / max(len(runs), 1)


def read_costs(told: str) -> dict[int, float]:
    """Seconds by tokens of "1:258,5:250", which is in milliseconds. Raises ValueError for what is not of that form."""
    try:
        costs = {int(size): float(ms) / 1e3 for size, ms in (each.split(":") for each in told.split(","))}
    except ValueError as error:
        raise ValueError(f"--verify-ms is TOKENS:MILLISECONDS, with commas between, got {told!r}") from error
    if 1 not in costs or min(costs.values()) <= 0:
        raise ValueError(f"--verify-ms needs the milliseconds of 1 token, and all over 0, got {told!r}")
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="files that record_texts.py wrote")
    parser.add_argument("--tune", nargs="*", type=Path, default=[], help="texts to tune the threshold on")
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=[0.1, 0.25, 0.45], help="draft token over plain step"
    )
    parser.add_argument("--verify-ms", default=QWEN_VERIFY_MS, help="a step's, by tokens fed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=4, help="shuffled orders (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    verify_s = read_costs(arguments.verify_ms)
    if min(arguments.ratios) <= 0 or arguments.seeds < 1:
        parser.error("--ratios must be over 0 and --seeds 1 or more")
    texts = read_texts(arguments.texts)
    tune = read_texts(arguments.tune) if arguments.tune else []
    results = {}
    for ratio in arguments.ratios:
        costs = Costs.at(ratio, verify_s)
        print(f"\na drafted token costs {ratio} of a plain step; {len(texts)} texts, {arguments.seeds} orders")
        results[str(ratio)] = compare(texts, tune, costs, arguments.seeds)
        results[str(ratio)]["copy_then_prose"] = told = copy_then_prose(texts, costs)
        print("copy, then prose:", {name: round(value, 3) for name, value in told.items()})
    print(json.dumps({"experiment": "simulate_texts", **describe(), "texts": len(texts), "ratios": results}))


if __name__ == "__main__":
    run_script(main)
