"""Measure what a server's rule for gamma is worth at several batch sizes: replay of recorded texts side by side.

RECORDS are files written by spec_stack.offline.records: greedy runs of the same prompts at several fixed gammas. A
batch is filled from all prompts in a drawn order, as many times over as it has places, and stays full. Each rule sees
records one step late (a server's lag without overlap) or two (with it). Two cost models, both stated in the output:

    measured    a forward's seconds from the records, at batch 1: base at one token, and per token more what the
                target's took; the draft's share per token is taken to be the target's. Says nothing of a GPU.
    card        assumed, not measured: the draft's forward is 15 % of the target's, and 256 tokens double a forward.

A step of gamma runs the draft gamma times, as SGLang's does. Prefills cost nothing. What a rule's own calls take is not
in the seconds. Rivals: fixed gammas (the best in hindsight), the rule before it had signals, SGLang's adaptive rule
with its own candidates, vLLM's trimming by survival (at several drafted lengths, and told the true costs), and, at
batch 1, `throughput` deciding inside the draft, which a captured graph does not allow. Gains are over the best fixed
gamma; several drawn orders are averaged, with their range.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.rivals.batch_rivals import AcceptanceAlone, SGLangAdaptive, SurvivalTrim
from spec_stack.controller.base import DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.fixed import Fixed
from spec_stack.controller.registry import make_batch_policy
from spec_stack.controller.throughput import Throughput
from spec_stack.offline.batch_replay import BatchCosts, replay_batch
from spec_stack.offline.records import read_records
from spec_stack.offline.replay import Costs, ReplayText, fit_costs, merge_runs, replay

GAMMAS = (0, 1, 2, 4, 8)
FIXED = (0, 1, 2, 3, 4, 5, 6, 8)
DRAFTED = (2, 4, 8)
MAX_GAMMA = max(GAMMAS)
CARD = BatchCosts(0.0015, 0.0015 / 256, 0.01, 0.01 / 256)


def measured(costs: Costs) -> BatchCosts:
    """From what a step took at batch 1, for every gamma."""
    target_s = costs.verify_s(0)
    per_token_s = (costs.verify_s(MAX_GAMMA) - target_s) / MAX_GAMMA
    draft_s = costs.draft_s(MAX_GAMMA) / MAX_GAMMA
    return BatchCosts(draft_s, draft_s * per_token_s / target_s, target_s, per_token_s)


@dataclass(frozen=True)
class Alone:
    """The costs of a batch of one, as `replay` takes them."""

    costs: BatchCosts

    def draft_s(self, gamma: int) -> float:
        return self.costs.draft_s(gamma, 1)

    def verify_s(self, gamma: int) -> float:
        return self.costs.verify_s(gamma + 1)

    def step_s(self, gamma: int) -> float:
        return self.costs.step_s(gamma, 1)


class WithoutNextToken(Policy):
    """A rule that is not told of the token that the next step begins with."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name

    def choose(self, context: StepContext) -> int:
        return self._policy.choose(context)

    def observe(self, record: StepRecord) -> None:
        self._policy.observe(replace(record, upcoming=None))


class Unsigned(WithoutNextToken):
    """A rule that is told of no signal."""

    def observe(self, record: StepRecord) -> None:
        super().observe(replace(record, signals=DraftSignals()))


def rules() -> dict[str, Callable[[], Policy]]:
    """The rules that learn from records, which may come late."""
    return {
        "throughput": lambda: make_batch_policy("throughput", gammas=GAMMAS),
        "throughput, next token unknown": lambda: WithoutNextToken(make_batch_policy("throughput", gammas=GAMMAS)),
        "throughput, no signals": lambda: Unsigned(make_batch_policy("throughput", gammas=GAMMAS)),
        "acceptance alone (before)": lambda: AcceptanceAlone(GAMMAS),
        "speckv, ridge": lambda: make_batch_policy("speckv", gammas=GAMMAS),
        "confidence": lambda: make_batch_policy("confidence"),
        "SGLang's adaptive": SGLangAdaptive,
    }


def rates(texts: list[ReplayText], costs: BatchCosts, batch_size: int, lags: list[int]) -> Iterator[tuple[str, float]]:
    """Tokens/s of every rule on these texts, by its name."""
    for gamma in FIXED:
        score = replay_batch(texts, Fixed(gamma), costs, batch_size, max_gamma=MAX_GAMMA)
        yield f"fixed-{gamma}", score.tokens_per_s
    for gamma in DRAFTED:
        score = replay_batch(texts, SurvivalTrim(costs, gamma), costs, batch_size, max_gamma=MAX_GAMMA)
        yield f"vLLM's survival, {gamma} drafted", score.tokens_per_s
    for name, make in rules().items():
        for lag in lags:
            score = replay_batch(texts, make(), costs, batch_size, lag=lag, max_gamma=MAX_GAMMA)
            yield f"{name}, lag {lag}", score.tokens_per_s
    if batch_size == 1:
        policy = Throughput(max_gamma=MAX_GAMMA)
        scores = [replay(text, policy, Alone(costs), max_gamma=MAX_GAMMA, reserve=0) for text in texts]
        yield "throughput in the draft", sum(s.num_tokens for s in scores) / sum(s.seconds for s in scores)


def compare(
    texts: list[ReplayText], costs: BatchCosts, batch_size: int, lags: list[int], orders: int, seed: int
) -> dict[str, Any]:
    """By rule: mean tokens/s over drawn orders, gain over the best fixed gamma, and that gain's range over orders."""
    by_rule: dict[str, list[float]] = defaultdict(list)
    for number in range(orders):
        rng = random.Random(seed + number)
        drawn = [text for _ in range(batch_size) for text in rng.sample(texts, len(texts))]
        for name, tokens_per_s in rates(drawn, costs, batch_size, lags):
            by_rule[name].append(tokens_per_s)
    best = max((f"fixed-{gamma}" for gamma in FIXED), key=lambda name: fmean(by_rule[name]))
    found = {}
    for name, each in by_rule.items():
        gains = [mine / theirs - 1 for mine, theirs in zip(each, by_rule[best], strict=True)]
        found[name] = {
            "tokens_per_s": round(fmean(each), 2),
            "gain": round(fmean(gains), 4),
            "range": [round(min(gains), 4), round(max(gains), 4)],
        }
    return {"best_fixed": best, "rules": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--precision", default="fp32", help="of the records (%(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lag", type=int, nargs="+", default=[1, 2], help="steps that records come late (1 2)")
    parser.add_argument("--orders", type=int, default=5, help="drawn orders of the prompts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_out_argument(parser)
    options = parser.parse_args()
    records = [record for record in read_records(*options.records) if record.precision == options.precision]
    if not records:
        parser.error(f"no records at {options.precision}")
    texts = merge_runs(records).texts
    models = {"measured": measured(fit_costs(records)[options.precision]), "card": CARD}
    line: dict[str, Any] = {"experiment": "compare_batches", **describe()}
    line |= {"precision": options.precision, "orders": options.orders, "prompts": len(texts)}
    for name, costs in models.items():
        line[name] = {"costs": asdict(costs)}
        for batch_size in options.batch_sizes:
            found = compare(texts, costs, batch_size, options.lag, options.orders, options.seed)
            line[name][f"batch {batch_size}"] = found
            print(f"\n{name} costs, batch {batch_size}: gain over {found['best_fixed']}, its range over orders")
            for rule, row in sorted(found["rules"].items(), key=lambda item: -item[1]["tokens_per_s"]):
                low, high = row["range"]
                print(f"{rule:40s} {row['tokens_per_s']:9.1f} tok/s {row['gain']:+7.1%}  [{low:+.1%}, {high:+.1%}]")
    print_report(line, options.out)


if __name__ == "__main__":
    run_script(main)
