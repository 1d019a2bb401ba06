"""The SpecKV authors' CSVs as records that can be replayed. Not a script; nothing of their data is kept here.

Their step file names neither prompts nor tokens, but its rows stand in the order of the experiment file, whose
num_steps tells where a run ends; from accepted tokens follow positions. Steps carry no time either: it is fitted from
the runs' seconds.

Signals are given per step as mean and extreme. Drafting is greedy, so a position's signal is the same number in every
run that drafts it, and four runs over one text give a system of such sums: bounds are propagated through it, and every
"which token is the extreme one" is tried out and dropped where it contradicts another step (one half to two thirds of
the positions come out within 0.02). The others are those of one of the worlds that the sums allow, drawn at random.
What that does to the scores of policies was measured on runs whose signals are known (experiments/LOG.md).
"""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.policies.published_columns import StepTable, read_steps
from experiments.policies.replay import Costs, StepCosts
from spec_stack.controller.base import DraftSignals, StepRecord

STEPS_FILE = "phase2_step_results.csv"
RUNS_FILE = "phase2_experiment_results.csv"
NUM_TOKENS = 80
ROUNDING = 1e-4
DETERMINED = 0.02

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Run:
    """One row of the experiment file with its steps: (start, gamma really drafted, accepted, row in the step file)."""

    precision: str
    gamma: int
    task: str
    prompt: str
    seconds: float
    num_tokens: int
    steps: list[tuple[int, int, int, int]]

    @property
    def num_drafted(self) -> int:
        return sum(gamma for _, gamma, _, _ in self.steps)


@dataclass(frozen=True)
class Published:
    """The authors' data, loaded. determined: share of on-path confidences recovered within DETERMINED, by precision."""

    table: StepTable
    runs: list[Run]
    records: list[StepRecord]
    costs: dict[str, StepCosts]
    cost_r2: dict[str, float]
    determined: dict[str, float]


def is_published(paths: Sequence[Path]) -> bool:
    """Tell whether this is the authors' folder (or their step file) and not records of ours."""
    return len(paths) == 1 and (paths[0].is_dir() or paths[0].name == STEPS_FILE)


def load(path: Path, seed: int = 0) -> Published:
    """Read the authors' folder (or the step file in it). Raises ValueError where rows and runs do not align."""
    if not (path / STEPS_FILE).is_file():
        raise ValueError(f"{path} holds no {STEPS_FILE}; give the folder of the SpecKV authors' CSVs")
    folder = path if path.is_dir() else path.parent
    table = read_steps(folder / STEPS_FILE)
    runs = _runs(table, folder / RUNS_FILE)
    costs, r2 = _fit_costs(runs)
    records: list[StepRecord] = []
    determined: dict[str, list[bool]] = defaultdict(list)
    for (precision, _), group in itertools.groupby(
        sorted(runs, key=lambda run: (run.precision, run.prompt, run.gamma)),
        key=lambda run: (run.precision, run.prompt),
    ):
        text = list(group)
        confidence, known = recover(text, 1 - table.mean_confidence, 1 - table.min_confidence, seed)
        entropy, _ = recover(text, table.mean_entropy, table.max_entropy, seed)
        determined[precision] += known
        for run in text:
            records += as_records(run, entropy, {key: 1 - value for key, value in confidence.items()}, costs[precision])
    shares = {precision: float(np.mean(flags)) for precision, flags in determined.items()}
    return Published(table, runs, records, costs, r2, shares)


def _runs(table: StepTable, path: Path) -> list[Run]:
    runs, row = [], 0
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            gamma, num_steps = int(cells["gamma"]), int(cells["num_steps"])
            rows = range(row, row + num_steps)
            same = all(
                table.precision[index] == cells["compression"]
                and table.gamma[index] == gamma
                and table.task[index] == cells["task"]
                and table.step[index] == index - row
                for index in rows
            )
            if not same:
                raise ValueError(f"{path}: run {len(runs)} does not align with rows {rows.start} to {rows.stop - 1}")
            steps, start = [], 0
            for index in rows:
                accepted = int(table.num_accepted[index])
                steps.append((start, min(gamma, NUM_TOKENS - start), accepted, index))
                start += accepted + 1
            seconds, num_tokens = float(cells["elapsed_sec"]), int(cells["num_tokens"])
            runs.append(Run(cells["compression"], gamma, cells["task"], cells["prompt"], seconds, num_tokens, steps))
            row += num_steps
    if row != len(table):
        raise ValueError(f"{path}: runs hold {row} steps, the step file {len(table)}")
    return runs


def _fit_costs(runs: list[Run]) -> tuple[dict[str, StepCosts], dict[str, float]]:
    """seconds = a * steps + b * drafted tokens, per precision. a is booked as verify time, b as draft time."""
    costs, r2 = {}, {}
    for precision in dict.fromkeys(run.precision for run in runs):
        mine = [run for run in runs if run.precision == precision]
        counts = np.array([(len(run.steps), run.num_drafted) for run in mine], dtype=float)
        seconds = np.array([run.seconds for run in mine])
        (base, per_token), *_ = np.linalg.lstsq(counts, seconds, rcond=None)
        residual = seconds - counts @ np.array([base, per_token])
        r2[precision] = float(1 - (residual**2).sum() / ((seconds - seconds.mean()) ** 2).sum())
        costs[precision] = StepCosts(0.0, float(per_token), float(base), 0.0)
    return costs, r2


def as_records(run: Run, entropy: dict[Key, float], confidence: dict[Key, float], costs: Costs) -> Iterator[StepRecord]:
    for step, (start, gamma, accepted, _) in enumerate(run.steps):
        keys = _keys(start, gamma, accepted)
        yield StepRecord(
            request_id=run.prompt,
            step=step,
            policy=f"fixed-{run.gamma}",
            precision=run.precision,
            task=run.task,
            is_prefill=False,
            keep_rate=1.0,
            gamma=gamma,
            num_accepted=accepted,
            num_tokens=min(accepted + 1, NUM_TOKENS - start),
            signals=DraftSignals([entropy[key] for key in keys], [confidence[key] for key in keys]),
            draft_s=costs.draft_s(gamma),
            verify_s=costs.verify_s(gamma),
            controller_s=0.0,
        )


def _keys(start: int, gamma: int, accepted: int) -> list[Key]:
    """A name for every drafted token that is the same in every run that drafts it."""
    on_path: list[Key] = [("on", position, 0) for position in range(start, start + min(accepted + 1, gamma))]
    return on_path + [("off", start + accepted, depth) for depth in range(1, gamma - accepted)]


class _ContradictionError(Exception):
    """The constraints cannot all hold."""


@dataclass
class _Constraint:
    keys: list[Key]
    mean: float
    extreme: float


class _Bounds:
    """Lower and upper bounds of non-negative unknowns, each constraint giving the mean and the largest of some."""

    def __init__(self, constraints: list[_Constraint]) -> None:
        self.constraints = constraints
        self.of_key: dict[Key, list[int]] = defaultdict(list)
        self.low: dict[Key, float] = {}
        self.high: dict[Key, float] = {}
        for index, constraint in enumerate(constraints):
            for key in constraint.keys:
                self.of_key[key].append(index)
                self.low[key] = 0.0
                self.high[key] = min(self.high.get(key, float("inf")), constraint.extreme)

    def propagate(self, queue: Sequence[int]) -> None:
        """Tighten until nothing moves. Raises _ContradictionError."""
        pending = set(queue)
        for _ in range(3000):
            if not pending:
                return
            constraint = self.constraints[pending.pop()]
            total, slack = len(constraint.keys) * constraint.mean, len(constraint.keys) * ROUNDING
            low = sum(self.low[key] for key in constraint.keys)
            high = sum(self.high[key] for key in constraint.keys)
            if low > total + 2 * slack or high < total - 2 * slack:
                raise _ContradictionError
            changed = []
            for key in constraint.keys:
                if self._narrow(key, total - (high - self.high[key]) - slack, total - (low - self.low[key]) + slack):
                    changed.append(key)
            largest = self._candidates(constraint)
            if not largest:
                raise _ContradictionError
            if len(largest) == 1 and self._narrow(largest[0], constraint.extreme - 2 * ROUNDING, float("inf")):
                changed.append(largest[0])
            for key in changed:
                pending.update(self.of_key[key])

    def _narrow(self, key: Key, low: float, high: float) -> bool:
        if low > self.high[key] + 30 * ROUNDING or high < self.low[key] - 30 * ROUNDING:
            raise _ContradictionError
        moved = False
        if high < self.high[key] - 2 * ROUNDING:
            self.high[key], moved = max(high, self.low[key]), True
        if low > self.low[key] + 2 * ROUNDING:
            self.low[key], moved = min(low, self.high[key]), True
        return moved

    def _candidates(self, constraint: _Constraint) -> list[Key]:
        return [key for key in constraint.keys if self.high[key] >= constraint.extreme - 4 * ROUNDING]

    def try_extremes(self) -> None:
        """Assume each possible "this is the extreme one" in turn, and keep what all that do not contradict agree on."""
        for _ in range(4):
            moved = False
            for constraint in self.constraints:
                largest = self._candidates(constraint)
                if len(largest) < 2 or all(self.high[key] - self.low[key] < 20 * ROUNDING for key in largest):
                    continue
                outcomes = []
                before = self.low, self.high
                for key in largest:
                    self.low, self.high = dict(before[0]), dict(before[1])
                    self.low[key] = max(self.low[key], min(self.high[key], constraint.extreme - 2 * ROUNDING))
                    try:
                        self.propagate(self.of_key[key])
                    except _ContradictionError:
                        continue
                    outcomes.append((self.low, self.high))
                self.low, self.high = dict(before[0]), dict(before[1])
                if not outcomes:
                    raise _ContradictionError
                for key in self.low:
                    low = min(outcome[0][key] for outcome in outcomes)
                    high = max(outcome[1][key] for outcome in outcomes)
                    if low > self.low[key] + 10 * ROUNDING or high < self.high[key] - 10 * ROUNDING:
                        moved = True
                        self.low[key], self.high[key] = max(low, self.low[key]), min(high, self.high[key])
            if not moved:
                return

    def settle(self, rng: np.random.Generator) -> None:
        """Narrow everything to one of the worlds the constraints allow, drawn at random."""
        for index in rng.permutation(len(self.constraints)):
            largest = self._candidates(self.constraints[index])
            rng.shuffle(largest)
            extreme = self.constraints[index].extreme
            if any(self.low[key] >= extreme - 4 * ROUNDING for key in largest):
                continue
            for key in largest:
                if self._try(key, extreme - 2 * ROUNDING, self.high[key]):
                    break
        keys = sorted(self.low)
        for index in rng.permutation(len(keys)):
            key = keys[index]
            if self.high[key] - self.low[key] > 4 * ROUNDING:
                value = float(rng.uniform(self.low[key], self.high[key]))
                self._try(key, value - ROUNDING, value + ROUNDING)

    def _try(self, key: Key, low: float, high: float) -> bool:
        """Narrow one unknown, or leave everything as it was where that contradicts something."""
        before = dict(self.low), dict(self.high)
        try:
            self._narrow(key, low, high)
            self.propagate(self.of_key[key])
        except _ContradictionError:
            self.low, self.high = before
            return False
        return True


def recover(
    runs: list[Run], means: np.ndarray, extremes: np.ndarray, seed: int = 0
) -> tuple[dict[Key, float], list[bool]]:
    """Values for every drafted token of one text, and whether each on-path one is determined.

    means and extremes (the largest) are by row of the step file; the unknowns are not negative.
    seed: of the draw among the worlds that the sums allow.
    """
    solved: _Bounds | None = None
    for num_runs in range(len(runs), 0, -1):
        # INT8 runs of one prompt may part ways; then the longest gammas are left out until the rest agree.
        bounds = _Bounds(_constraints(runs[:num_runs], means, extremes))
        try:
            bounds.propagate(range(len(bounds.constraints)))
            bounds.try_extremes()
        except _ContradictionError:
            continue
        solved = bounds
        break
    values: dict[Key, float] = {}
    known: list[bool] = []
    certain = {key for key, low in solved.low.items() if solved.high[key] - low < DETERMINED} if solved else set()
    if solved is not None:
        solved.settle(np.random.default_rng(seed))
    wanted = {key for run in runs for start, gamma, accepted, _ in run.steps for key in _keys(start, gamma, accepted)}
    last = float(np.median([means[row] for run in runs for _, _, _, row in run.steps]))
    for key in sorted(wanted, key=lambda key: (key[0] == "off", key)):
        low = solved.low.get(key) if solved else None
        if key[0] == "on":
            known.append(key in certain)
        if solved is not None and low is not None:
            values[key] = (low + solved.high[key]) / 2
        elif key[0] == "off":
            # What follows a wrong token is filled from the token before it, which a policy has seen by then.
            before: Key = ("off", key[1], key[2] - 1) if key[2] > 1 else ("on", key[1], 0)
            values[key] = values.get(before, last)
        else:
            values[key] = last
        if key[0] == "on":
            last = values[key]
    return values, known


def _constraints(runs: list[Run], means: np.ndarray, extremes: np.ndarray) -> list[_Constraint]:
    """Steps of the runs, each run up to where it contradicts an earlier one about which tokens are right."""
    constraints = []
    right: dict[int, bool] = {}
    for run in runs:
        for start, gamma, accepted, row in run.steps:
            claims = {start + index: index < accepted for index in range(min(accepted + 1, gamma))}
            if any(right.get(position, claim) != claim for position, claim in claims.items()):
                break
            right.update(claims)
            keys = _keys(start, gamma, accepted)
            constraints.append(_Constraint(keys, float(means[row]), float(extremes[row])))
    return constraints
