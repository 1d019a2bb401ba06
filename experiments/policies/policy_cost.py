"""Measure what a server's policies cost in processor time, by the number of requests at once?

Each policy decides for a batch of requests and is told what came of it, step after step, with drawn signals: what is
timed is `choose` and `observe` alone, in microseconds of processor time a step. Medians over repeats, interleaved.
In a loop both find their code and data in the processor's caches. On a server a forward has run between any two; with
--cold as much memory is read before each.
Prints a table, ends in one JSON line.

    python -m experiments.policies.policy_cost
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack.controller.base import BatchMember, DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.registry import BATCH_POLICY_NAMES, make_batch_policy
from spec_stack.hf.loading import ASSETS, predictors_beside

_GAMMAS = (0, 1, 2, 4, 8)
# More than the last cache of a processor holds for one core.
_COLD_BYTES = 64 << 20


def drawn(rng: random.Random, request: str, step: int, gamma: int, seconds: float) -> StepRecord:
    """A step of one request as a server records it: every token is accepted as often as the draft says."""
    confidence = [rng.random() ** 0.3 for _ in range(gamma)]
    num_accepted = next((at for at, chance in enumerate(confidence) if rng.random() > chance), gamma)
    return StepRecord(
        request_id=request,
        step=step,
        policy="",
        precision="fp32",
        task="",
        is_prefill=False,
        keep_rate=1.0,
        gamma=gamma,
        num_accepted=num_accepted,
        num_tokens=num_accepted + 1,
        signals=DraftSignals([3 * (1 - chance) for chance in confidence], confidence),
        draft_s=0.0,
        verify_s=seconds,
        controller_s=0.0,
        lag=1,
        upcoming=DraftSignals([1.0], [rng.random()]),
    )


def seconds_a_step(
    policy: Policy, num_requests: int, num_steps: int, seed: int, empty_caches: Callable[[], object] = lambda: None
) -> float:
    """Processor seconds of a decision and of what it learns, a step, once the policy knows its requests.

    empty_caches is called before each.
    """
    rng = random.Random(seed)
    members = tuple(BatchMember(str(number), _GAMMAS[-1]) for number in range(num_requests))
    spent, last = 0.0, None
    for step in range(2 * num_steps):
        context = StepContext(
            step=step,
            max_gamma=_GAMMAS[-1],
            last=last,
            precision="fp32",
            batch_size=num_requests,
            lag=1,
            members=members,
        )
        empty_caches()
        started = process_time()
        gamma = policy.choose(context)
        decided = process_time() - started
        seconds = 5e-3 + 1e-3 * gamma
        records = [drawn(rng, member.request_id, step, gamma, seconds / num_requests) for member in members]
        empty_caches()
        started = process_time()
        for record in records:
            policy.observe(record)
        last = records[-1]
        if step >= num_steps:
            spent += decided + process_time() - started
    return spent / num_steps


def measure(
    names: Sequence[str], batches: Sequence[int], num_steps: int, repeats: int, cold: bool = False
) -> dict[str, dict[int, Any]]:
    """By policy and batch, microseconds: the median, the least and the most."""
    memory = np.ones(_COLD_BYTES // 8 if cold else 0)
    predictors = predictors_beside(ASSETS / "draft")
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for batch in batches:
            for name in names:
                options = {"predictor": predictors[name]} if name in predictors else {}
                policy = make_batch_policy(name, **options)
                taken[name, batch].append(1e6 * seconds_a_step(policy, batch, num_steps, repeat, memory.sum))
    return {
        name: {
            batch: {
                "median": median(taken[name, batch]),
                "least": min(taken[name, batch]),
                "most": max(taken[name, batch]),
            }
            for batch in batches
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=BATCH_POLICY_NAMES, default=list(BATCH_POLICY_NAMES))
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16, 48], help="(default 1 4 16 48)")
    parser.add_argument("--steps", type=int, default=100, help="timed, after as many that are not (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--cold", action="store_true", help="with emptied caches")
    add_out_argument(parser)
    options = parser.parse_args()
    if min(*options.at_once, options.steps, options.repeats) < 1:
        parser.error("--at-once, --steps and --repeats must be 1 or more")
    found = measure(options.policies, options.at_once, options.steps, options.repeats, options.cold)
    print("µs of processor time a step" + "".join(f"{batch:>24d}" for batch in options.at_once))
    for name, row in found.items():
        cells = (f"{row[batch]['median']:.0f} ({row[batch]['least']:.0f}-{row[batch]['most']:.0f})" for batch in row)
        print(f"  {name:25s}" + "".join(f"{cell:>24s}" for cell in cells))
    print_report({"experiment": "policy_cost", **describe(), "cold": options.cold, "us_a_step": found}, options.out)


if __name__ == "__main__":
    run_script(main)
