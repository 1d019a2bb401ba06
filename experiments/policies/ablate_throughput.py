"""What does each part of the `throughput` policy contribute, and how far could it be off?

Replays RECORDS (ours, or the SpecKV authors' folder) under variants of the policy: its threshold scaled by a factor
(1.0 is the rule), step times with noise and stalls, and plain confidence thresholds, of which the best in
hindsight shows what tuning by hand could reach. No prompts are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.common.script import run_script
from experiments.policies import evaluate_policies as evaluation
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import make_policy
from spec_stack.controller.throughput import Throughput
from spec_stack.offline.replay import Costs, ReplayText, replay


@dataclass
class Scaled(Throughput):
    """The rule with its threshold multiplied by a factor."""

    factor: float = 1.0

    def threshold(self, precision: str) -> float:
        return min(self.factor * super().threshold(precision), 1.0)


class NoisyCosts:
    """Costs with log-normal noise of 20 % and, once in a hundred steps, a stall of ten times."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._random = random.Random(0)

    def _factor(self) -> float:
        return math.exp(self._random.gauss(0, 0.2)) * (10 if self._random.random() < 0.01 else 1)

    def draft_s(self, gamma: int) -> float:
        return self._costs.draft_s(gamma) * self._factor()

    def verify_s(self, gamma: int) -> float:
        return self._costs.verify_s(gamma) * self._factor()

    def step_s(self, gamma: int) -> float:
        return self.draft_s(gamma) + self.verify_s(gamma)


def tokens_per_s(texts: list[ReplayText], policy: Policy, shown: Costs, true: Costs, reserve: int) -> float:
    """By the true costs, while the policy is shown others."""
    scores = [replay(text, policy, shown, reserve=reserve) for text in texts]
    seconds = sum(true.step_s(gamma) for score in scores for gamma in score.gammas)
    return sum(score.num_tokens for score in scores) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    options = parser.parse_args()
    data = evaluation.load(options.records)
    variants: dict[str, Callable[[], Policy]] = {"throughput": Throughput, "throughput, noisy times": Throughput}
    for factor in (0.7, 0.8, 0.9, 1.1, 1.2):
        variants[f"threshold x {factor}"] = partial(Scaled, factor=factor)
    for threshold in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        variants[f"confidence {threshold}"] = partial(make_policy, "confidence", threshold=threshold)
    for gamma in (2, 4, 6, 8):
        variants[f"fixed-{gamma}"] = partial(make_policy, "fixed", gamma=gamma)
    # Tasks are interleaved, as a server would see them.
    order = sorted(range(len(data.texts)), key=lambda index: index % 5)
    texts = [data.texts[index] for index in order]
    result: dict[str, dict[str, float]] = {}
    print(f"{'variant':40s}" + "".join(f" {precision:>8s}" for precision in data.precisions))
    for name, make in variants.items():
        result[name] = {}
        for precision in data.precisions:
            true = data.costs[precision]
            shown: Costs = NoisyCosts(true) if "noisy" in name else true
            mine = [text for text in texts if text.precision == precision]
            result[name][precision] = tokens_per_s(mine, make(), shown, true, data.reserve)
        print(f"{name:40s}" + "".join(f" {value:8.2f}" for value in result[name].values()))
    print(json.dumps(result))


if __name__ == "__main__":
    run_script(main)
