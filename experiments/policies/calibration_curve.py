"""Are the acceptance estimates of `throughput` probabilities? A calibration curve over replayed RECORDS.

Every time the policy asks for P(everything drafted so far and the next token are accepted) and the next token is then
drafted, the answer is set beside what came of it. Printed by tenths: mean estimate, share that came true, count; and
the expected calibration error, with a 95 % interval over prompts. The policy runs as ever, so only what it chose to
draft is judged, and it is fresh at the first prompt. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies import evaluate_policies as evaluation
from spec_stack.controller.acceptance import OnlineAcceptance
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.throughput import Throughput
from spec_stack.offline.replay import replay


class Noting(OnlineAcceptance):
    """Notes every estimate and what came of it: rows of (estimate, came true) per prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[tuple[float, float]]] = {}
        self._asked: list[float] = []

    def begin(self) -> None:
        super().begin()
        self._asked = []

    def extend(self, signals: DraftSignals) -> tuple[float, float]:
        chances = super().extend(signals)
        self._asked.append(chances[0])
        return chances

    def learn(self, record: StepRecord) -> None:
        """Estimate i was of tokens 0 to i."""
        rows = self.rows.setdefault(record.request_id, [])
        rows += [(asked, float(record.num_accepted > index)) for index, asked in enumerate(self._asked)]
        super().learn(record)


def error(rows: np.ndarray[Any, Any], num_bins: int) -> float:
    """Expected calibration error over bins of equal width. rows (n, 2): estimate, came true."""
    bins = np.minimum((rows[:, 0] * num_bins).astype(int), num_bins - 1)
    gaps = [abs(float((rows[bins == at, 0] - rows[bins == at, 1]).sum())) for at in range(num_bins)]
    return sum(gaps) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="record files, or the SpecKV authors' folder")
    parser.add_argument("--bins", type=int, default=10)
    add_out_argument(parser)
    options = parser.parse_args()
    data = evaluation.load(options.records)
    result: dict[str, Any] = {}
    for precision in data.precisions:
        noting = Noting()
        policy = Throughput(acceptance=noting)
        for text in (text for text in data.texts if text.precision == precision):
            replay(text, policy, data.costs[precision], reserve=data.reserve)
        per_prompt = [np.array(rows) for rows in noting.rows.values() if rows]
        rows = np.concatenate(per_prompt)
        rng = np.random.default_rng(0)
        draws = [
            error(np.concatenate([per_prompt[at] for at in rng.integers(len(per_prompt), size=len(per_prompt))]),
                  options.bins)
            for _ in range(200)
        ]  # fmt: skip
        low, high = np.percentile(draws, [2.5, 97.5])
        middle = error(rows, options.bins)
        print(f"\n{precision}: {len(rows)} estimates, calibration error {middle:.3f} [{low:.3f}, {high:.3f}]")
        print("  estimate  came true  count")
        curve = []
        bins = np.minimum((rows[:, 0] * options.bins).astype(int), options.bins - 1)
        for at in range(options.bins):
            inside = rows[bins == at]
            if len(inside):
                mean, share = inside.mean(axis=0).tolist()
                curve.append([mean, share, len(inside)])
                print(f"  {mean:8.3f}  {share:9.3f}  {len(inside):5d}")
        result[precision] = {"error": middle, "interval": [float(low), float(high)], "curve": curve}
    print_report({"experiment": "calibration_curve", **describe(), "result": result}, options.out)


if __name__ == "__main__":
    run_script(main)
