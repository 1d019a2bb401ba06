"""A leaderboard of policies: as a table, CSV and a plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spec_stack.bench.intervals import Interval, ratio_interval

ALL = "all"
ORACLE = "oracle"
_PLOTTED_INCHES = (6.4, 0.26, 1.2)


@dataclass(frozen=True)
class Line:
    """One policy over the prompts that all policies answered, of a task or of "all".

    speed: seconds of the leaderboard's baseline over the policy's. tokens_per_s: of whole answers (live), or of decode
    steps (replay). tokens_per_step, proposed_per_step: output and proposed tokens per forward of the target.
    acceptance: accepted over proposed tokens; None without proposals. num_same: answers with exactly the baseline's
    tokens; None in a replay, where the text is given.
    """

    precision: str
    task: str
    policy: str
    num_prompts: int
    speed: Interval
    tokens_per_s: float
    tokens_per_step: float
    proposed_per_step: float
    acceptance: float | None
    num_same: int | None


class Answer(NamedTuple):
    """A prompt's answer under a policy. is_same: it has the baseline's tokens; None in a replay."""

    seconds: float
    num_tokens: int
    num_steps: int
    num_proposed: int
    num_accepted: int
    is_same: bool | None = None


def lines_by_task(
    precision: str,
    answers: Mapping[str, Mapping[str, Answer]],
    baseline: str,
    prompts: Sequence[tuple[str, str]],
    seed: int = 0,
) -> list[Line]:
    """The lines of all policies, over all prompts and by task. answers: by policy and prompt. prompts: with tasks."""
    lines = []
    for task in with_all(of for _, of in prompts):
        keys = [key for key, of in prompts if task in (ALL, of)]
        before = [answers[baseline][key].seconds for key in keys]
        for policy, by_key in answers.items():
            done = [by_key[key] for key in keys]
            seconds, num_tokens = [each.seconds for each in done], sum(each.num_tokens for each in done)
            num_steps, num_proposed = sum(each.num_steps for each in done), sum(each.num_proposed for each in done)
            same = [each.is_same for each in done if each.is_same is not None]
            lines.append(
                Line(
                    precision=precision,
                    task=task,
                    policy=policy,
                    num_prompts=len(keys),
                    speed=ratio_interval(before, seconds, seed),
                    tokens_per_s=num_tokens / sum(seconds),
                    tokens_per_step=num_tokens / num_steps,
                    proposed_per_step=num_proposed / num_steps,
                    acceptance=sum(each.num_accepted for each in done) / num_proposed if num_proposed else None,
                    num_same=sum(same) if same else None,
                )
            )
    return lines


@dataclass(frozen=True)
class Leaderboard:
    """Policies on the same prompts: a line per precision, task and policy.

    source: what was measured, in words. baseline: the policy that speeds are over. notes: what a reader must know.
    """

    source: str
    baseline: str
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    def of(self, precision: str, task: str = ALL) -> list[Line]:
        """The policies at a precision on a task, fastest first."""
        own = [line for line in self.lines if (line.precision, line.task) == (precision, task)]
        return sorted(own, key=lambda line: -line.speed.value)

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(line.precision for line in self.lines))

    @property
    def tasks(self) -> list[str]:
        """The tasks, without "all"."""
        return [task for task in dict.fromkeys(line.task for line in self.lines) if task != ALL]

    def table(self) -> str:
        """The leaderboard for a terminal: a table per precision, with the speeds on single tasks."""
        found = [self.source]
        for precision in self.precisions:
            ranked = self.of(precision)
            title = f"{precision}, {ranked[0].num_prompts} prompts; speed over {self.baseline} with 95 % intervals"
            found += ["", title, *aligned([(*_HEADER, *self.tasks), *(self._cells(line) for line in ranked)])]
        return "\n".join([*found, *([""] if self.notes else []), *self.notes])

    def _cells(self, line: Line) -> tuple[str, ...]:
        by_task = {(each.task, each.policy): each for each in self.lines if each.precision == line.precision}
        return (
            line.policy,
            f"{line.speed:.2f}",
            f"{line.tokens_per_s:.1f}",
            f"{line.tokens_per_step:.2f}",
            f"{line.proposed_per_step:.2f}",
            "–" if line.acceptance is None else f"{line.acceptance:.0%}",
            "–" if line.num_same is None else f"{line.num_same}/{line.num_prompts}",
            *(f"{by_task[task, line.policy].speed.value:.2f}" for task in self.tasks),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def write_csv(self, path: str | Path) -> None:
        """Write a row per line."""
        rows = [
            {**asdict(line), "speed": line.speed.value, "speed_low": line.speed.low, "speed_high": line.speed.high}
            for line in self.lines
        ]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def plot(self, path: str | Path) -> None:
        """Draw the speeds with their intervals, a panel per precision. Raises ImportError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a plot needs matplotlib; pip install matplotlib, or leave --plot out") from error
        num_policies = max(len(self.of(precision)) for precision in self.precisions)
        width, height, margin = _PLOTTED_INCHES
        num_columns = min(2, len(self.precisions))
        num_rows = -(-len(self.precisions) // num_columns)
        size = (width * num_columns, (height * num_policies + margin) * num_rows)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False).flat
        for axes, precision in zip(panels, self.precisions, strict=False):
            ranked = self.of(precision)[::-1]
            values = [line.speed.value for line in ranked]
            below = [line.speed.value - line.speed.low for line in ranked]
            above = [line.speed.high - line.speed.value for line in ranked]
            names = [line.policy for line in ranked]
            axes.barh(names, values, xerr=[below, above], color="#4c9a8f", ecolor="#333333", capsize=2)
            axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
            axes.set_title(f"{precision}, {ranked[0].num_prompts} prompts")
            axes.set_xlabel(f"speed over {self.baseline}, 95 % intervals")
        figure.savefig(path, dpi=120)


_HEADER = ("policy", "speed", "tokens/s", "tokens/step", "proposed/step", "accepted", "same text")


def with_all(tasks: Iterable[str]) -> list[str]:
    """ "all", and each task where there are several."""
    found = dict.fromkeys(tasks)
    return list(dict.fromkeys([ALL, *filter(None, found)])) if len(found) > 1 else [ALL]


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as aligned lines, with a rule below the first."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
