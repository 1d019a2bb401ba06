"""Plots of what decides a gamma policy: how acceptance depends on gamma and on the draft's signals, and what policies
make of it.

From RECORDS (ours, or the SpecKV authors' folder) into --out: acceptance.png (acceptance rate and tokens/step against
gamma), signals.png (confidence and entropy against acceptance), policies.png (tokens/s with intervals over prompts),
gammas.png (which gammas the policies really draft) and pareto.png (how well a predictor foretells a step's acceptance
against what a decision costs). Scores come from evaluate_policies.py's replay, on prompts left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib

from experiments.policies import evaluate_policies as evaluation

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.common.script import run_script
from experiments.policies.published_columns import StepTable, tabulate
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import STEP_MODELS
from spec_stack.offline.training import as_network, make_estimator, step_examples

COLOURS = {"fp32": "#555555", "bf16": "#8c6bb1", "fp16": "#1b6ca8", "int8": "#d9822b", "nf4": "#3a9c5f"}
SHOWN = (
    "throughput",
    "throughput mlp",
    "bandit warm",
    "best-fixed",
    "fixed-4",
    "ema",
    "confidence",
    "speckv mlp-16",
    "heuristic",
)
CANDIDATES = (2, 4, 6, 8)


def style() -> None:
    plt.rcParams.update(
        {
            "figure.dpi": 130,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        }
    )


def plot_acceptance(table: StepTable, path: Path) -> None:
    """Acceptance rate falls with gamma while tokens per step rise: neither alone says which gamma is best."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    gammas = [int(gamma) for gamma in np.unique(table.gamma) if (table.gamma == gamma).sum() >= 100]
    for number, precision in enumerate(dict.fromkeys(table.precision.tolist())):
        x = np.array(gammas) + 0.09 * (number - 1)
        masks = [(table.precision == precision) & (table.gamma == gamma) for gamma in gammas]
        for axis, values in zip(axes, (table.acceptance_rate, table.num_tokens), strict=True):
            means = [values[mask].mean() for mask in masks]
            errors = [1.96 * values[mask].std() / np.sqrt(mask.sum()) for mask in masks]
            axis.errorbar(x, means, errors, marker="o", capsize=3, color=COLOURS[precision], label=precision)
    axes[0].set(xlabel="gamma", ylabel="acceptance rate", ylim=(0, 1), title="Acceptance rate per step")
    axes[1].set(xlabel="gamma", ylabel="tokens per step", title="Tokens per step")
    for axis in axes:
        axis.set_xticks(gammas)
    axes[0].legend()
    figure.savefig(path)
    plt.close(figure)


def plot_signals(table: StepTable, path: Path) -> None:
    """Mean acceptance in ten equal-count bins of each signal."""
    signals = (
        ("mean confidence", table.mean_confidence),
        ("min confidence", table.min_confidence),
        ("mean entropy (bits)", table.mean_entropy),
        ("max entropy (bits)", table.max_entropy),
    )
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.5), sharey=True)
    for axis, (name, values) in zip(axes, signals, strict=True):
        for precision in dict.fromkeys(table.precision.tolist()):
            mask = table.precision == precision
            parts = np.array_split(np.argsort(values[mask]), 10)
            x = [values[mask][part].mean() for part in parts]
            y = [table.acceptance_rate[mask][part].mean() for part in parts]
            correlation = np.corrcoef(values[mask], table.acceptance_rate[mask])[0, 1]
            axis.plot(x, y, marker="o", ms=4, color=COLOURS[precision], label=f"{precision}  r = {correlation:+.2f}")
        axis.set(xlabel=name, ylim=(0, 1.02))
        axis.legend(fontsize=8, loc="lower right" if "conf" in name else "lower left")
    axes[0].set_ylabel("acceptance rate")
    figure.suptitle("The draft's signals over a step, and how much of it is accepted (ten equal-count bins)")
    figure.savefig(path)
    plt.close(figure)


def plot_policies(summary: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(summary), figsize=(max(4.2 * len(summary) + 1.2, 8), 4.2), sharey=True, squeeze=False
    )
    names = [name for name in SHOWN if name in next(iter(summary.values()))][::-1]
    for axis, (precision, rows) in zip(axes[0], summary.items(), strict=True):
        rates = [rows[name]["tokens_per_s"] for name in names]
        errors = np.abs(np.array([rows[name]["interval"] for name in names]).T - rates)
        colours = [COLOURS[precision] if name.startswith("throughput") else "#b8bec6" for name in names]
        axis.barh(names, rates, xerr=errors, color=colours, height=0.68, error_kw={"lw": 1, "capsize": 3})
        best = rows["best-fixed"]["tokens_per_s"]
        axis.axvline(best, color="#333333", lw=1, ls="--", label=f"best fixed {best:.1f}")
        ceiling = rows["oracle"]["tokens_per_s"]
        axis.set_xlim(0, 1.22 * max(rates))
        axis.set(title=f"{precision}  (oracle {ceiling:.1f})", xlabel="tokens/s")
        axis.grid(axis="y", visible=False)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16))
    figure.suptitle("Tokens per second on left-out prompts, by replay, with 95 % intervals over prompts")
    figure.savefig(path)
    plt.close(figure)


def plot_gammas(results: evaluation.Results, precisions: list[str], path: Path) -> None:
    names = [name for name in ("throughput", "speckv mlp-16", "ema", "confidence") if name in results.scores]
    figure, axes = plt.subplots(
        len(names),
        len(precisions),
        figsize=(max(3.6 * len(precisions) + 0.6, 6), 1.9 * len(names)),
        sharex=True,
        squeeze=False,
    )
    for row, name in zip(axes, names, strict=True):
        for axis, precision in zip(row, precisions, strict=True):
            gammas = [gamma for score in results.scores[name][precision].values() for gamma in score.gammas]
            shares = np.bincount(gammas, minlength=MAX_GAMMA + 1) / len(gammas)
            axis.bar(np.arange(MAX_GAMMA + 1), shares, color=COLOURS[precision], width=0.8)
            axis.text(
                0.97, 0.97, f"mean {np.mean(gammas):.1f}", transform=axis.transAxes, ha="right", va="top", fontsize=9
            )
            axis.set_xticks(range(0, MAX_GAMMA + 1, 2))
            axis.set_ylim(0, 1.3 * shares.max())
            axis.grid(axis="x", visible=False)
        row[0].set_ylabel(f"{name}\nshare of steps")
    for axis, precision in zip(axes[0], precisions, strict=True):
        axis.set_title(precision)
    for axis in axes[-1]:
        axis.set_xlabel("tokens drafted in a step")
    figure.savefig(path)
    plt.close(figure)


def predictor_points(records: list[StepRecord], num_folds: int = 5) -> dict[str, tuple[float, float]]:
    """Microseconds per decision (one prediction per candidate gamma) and correlation on left-out prompts."""
    inputs, rates, groups = step_examples(records)
    number = {group: index % num_folds for index, group in enumerate(dict.fromkeys(groups))}
    fold_of = np.array([number[group] for group in groups])
    points: dict[str, tuple[float, float]] = {}
    for name in STEP_MODELS:
        held_out = np.zeros(len(rates))
        for fold in range(num_folds):
            model = make_estimator(name).fit(inputs[fold_of != fold], rates[fold_of != fold])
            held_out[fold_of == fold] = np.clip(model.predict(inputs[fold_of == fold]), 0, 1)
        correlation = float(np.corrcoef(held_out, rates)[0, 1])
        row = inputs[0].tolist()
        points[f"{name} (scikit-learn)"] = (_decision_us(partial(model.predict, [row]), 20), correlation)
        if not name.startswith("rf"):
            network = as_network(model)
            points[f"{name} (exported)"] = (_decision_us(partial(network.output, row), 2000), correlation)
    return points


def _decision_us(predict: Callable[[], Any], repeats: int) -> float:
    began = perf_counter()
    for _ in range(repeats * len(CANDIDATES)):
        predict()
    return 1e6 * (perf_counter() - began) / repeats


def plot_pareto(points: dict[str, tuple[float, float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7.2, 4.2))
    for name, (cost_us, correlation) in points.items():
        exported = name.endswith("(exported)")
        axis.scatter(cost_us, correlation, s=60, color="#3a9c5f" if exported else "#1b6ca8", zorder=3)
    top = None
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for name, (cost_us, correlation) in sorted(points.items(), key=lambda item: -item[1][1]):
        # Ridge and MLPs nearly coincide, so labels of close points are set below one another.
        near = top is not None and abs(np.log10(cost_us / top[0])) < 0.5 and top[1] - correlation < 0.012
        height = top[1] - 0.012 if near and top is not None else correlation
        axis.annotate(
            name.split(" (")[0], (cost_us, correlation), (cost_us * 1.18, height), va="center", fontsize=9, bbox=box
        )
        top = (cost_us, height)
    axis.axvline(1000, color="#b33", ls="--", lw=1)
    label = {"rotation": 90, "ha": "right", "va": "bottom", "color": "#b33", "fontsize": 8}
    axis.text(940, axis.get_ylim()[0], " 1 ms, the paper's limit", label)
    axis.scatter([], [], color="#1b6ca8", label="scikit-learn predict")
    axis.scatter([], [], color="#3a9c5f", label="exported arrays")
    axis.set(xscale="log", xlabel="µs per decision (four candidate gammas)", ylabel="correlation on left-out prompts")
    axis.set_title("Foretelling a step's acceptance from the step before")
    axis.set_xlim(right=axis.get_xlim()[1] * 2)
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="record files, or the SpecKV authors' folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files")
    parser.add_argument("--folds", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    style()
    data = evaluation.load(options.records)
    table = data.table if data.table is not None else tabulate(data.records)
    results = evaluation.evaluate(data, options.folds, MAX_GAMMA)
    summary = evaluation.summarise(data, results, 2000, 0)
    points = predictor_points(data.records)
    plot_acceptance(table, options.out / "acceptance.png")
    plot_signals(table, options.out / "signals.png")
    plot_policies(summary, options.out / "policies.png")
    plot_gammas(results, data.precisions, options.out / "gammas.png")
    plot_pareto(points, options.out / "pareto.png")
    print(f"{'predictor':24s} {'µs':>9s} {'corr':>6s}")
    for name, (cost_us, correlation) in points.items():
        print(f"{name:24s} {cost_us:9.1f} {correlation:6.3f}")
    print(json.dumps({"out": str(options.out), "predictors": points}))


if __name__ == "__main__":
    run_script(main)
