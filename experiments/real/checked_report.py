"""What the rows of checked.py tell: AUROC of the dropped attention, and what a ladder of keep rates loses and gains.

Rows with a "half" were there when the signal was chosen; the others are new. A rate without "dropped" is of an earlier
selection, and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_stack.bench.rows import Row
from spec_stack.binomial import upper_bound

RATES = (0.1, 0.2, 0.4)
LOST_NATS = 0.3
THRESHOLDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
RATIOS = (0.2, 0.1, 0.05)
LADDER = RATES[:2]
"""Rates that the target has read of every prompt."""
# Of the measured pair, by weights.
_RATIO = 0.32
GROUPS = {
    "facts": ("fact", "paraphrase", "several"),
    "code": ("function", "constant"),
    "logs and JSON": ("log", "log, other words", "json"),
    "dialogues": ("dialogue", "dialogue, other words"),
    "agents": ("agents",),
    "multi-hop": ("chain", "hotpotqa", "2wikimultihopqa", "musique"),
    "summaries": ("qmsum", "multi_news"),
}
_DRAWS = 2000


def loss(row: Row, rate: float) -> float:
    """Nats a token that the dense answer loses under a keep rate."""
    pruned = row[str(rate)].get("logprobs")
    # Where the draft was sure before, the rate above was not read: it keeps more.
    return 0.0 if pruned is None else (sum(row["own"]) - sum(pruned)) / len(row["own"])


def is_lost(row: Row, rate: float) -> bool:
    """Whether a right answer became wrong, or where none is known to be right, whether the loss is over LOST_NATS."""
    told = row[str(rate)]
    if row["is_right"]:
        return not told.get("is_right", True)
    return loss(row, rate) > LOST_NATS


DROPPED = "dropped attention"


def auroc(values: Sequence[float], labels: Sequence[bool]) -> float:
    """The chance that a lost case has the higher value; ties are halves. NaN without both sorts."""
    lost = np.array([value for value, label in zip(values, labels, strict=True) if label])
    kept = np.array([value for value, label in zip(values, labels, strict=True) if not label])
    if not (len(lost) and len(kept)):
        return float("nan")
    return float(((lost[:, None] > kept).mean() + (lost[:, None] >= kept).mean()) / 2)


def _auroc_interval(values: Sequence[float], labels: Sequence[bool], groups: Sequence[int]) -> list[float]:
    """AUROC with its 95 % interval; the cases of a prompt are drawn together."""
    rng = np.random.default_rng(0)
    cells: dict[int, list[int]] = {group: [] for group in groups}
    for at, group in enumerate(groups):
        cells[group].append(at)
    names, found = list(cells), []
    for _ in range(_DRAWS):
        drawn = [at for name in rng.choice(len(names), len(names)) for at in cells[names[name]]]
        found.append(auroc([values[at] for at in drawn], [labels[at] for at in drawn]))
    ends = np.nanpercentile(found, [2.5, 97.5])
    return [round(each, 3) for each in (auroc(values, labels), *map(float, ends))]


def ladder(row: Row, threshold: float, rates: Sequence[float] = LADDER) -> tuple[float | None, int]:
    """The rate that the check keeps (None: the whole prompt), and how many it tries."""
    for at, rate in enumerate(rates):
        if row[str(rate)]["dropped"] <= threshold:
            return rate, at + 1
    return None, len(rates)


def cost(row: Row, rate: float | None, num_tried: int = 0, ratio: float = _RATIO) -> float:
    """Processor seconds to the first token. num_tried: 0 checks nothing; the draft reads no rate. ratio: of draft to
    target, by which the draft's seconds are scaled."""
    seconds: float = row["scoring_s"] + (row["look_ahead_s"] if num_tried else 0)
    target: float = row["dense_s"] if rate is None else row[str(rate)]["sparse_s"]
    return seconds * ratio / _RATIO + target


def _rule(rows: Sequence[Row], choose: Callable[[Row], tuple[float | None, int]]) -> dict[str, Any]:
    chosen = [(row, *choose(row)) for row in rows]
    num_lost = sum(rate is not None and is_lost(row, rate) for row, rate, _ in chosen)
    dense = sum(row["dense_s"] for row in rows)

    def over_dense(ratio: float = _RATIO) -> float:
        spent = sum(cost(row, rate, tried, ratio) for row, rate, tried in chosen)
        return round(float(dense) / spent, 2)

    return {
        "n": len(rows),
        "lost": num_lost,
        "lost_at_most": round(upper_bound(num_lost, len(rows)), 3),
        "refused": round(float(np.mean([rate is None for _, rate, _ in chosen])), 3),
        "over_dense": over_dense(),
        "over_dense_at_ratio": {str(ratio): over_dense(ratio) for ratio in RATIOS},
    }


def _has_cell(row: Row, rate: float) -> bool:
    return "logprobs" in row[str(rate)] and "dropped" in row[str(rate)]


def _auroc_of(rows: Sequence[Row], rates: Sequence[float]) -> dict[str, Any]:
    cells = [(at, row, rate) for at, row in enumerate(rows) for rate in rates if _has_cell(row, rate)]
    lost, prompts = [is_lost(row, rate) for _, row, rate in cells], [at for at, _, _ in cells]
    found: dict[str, Any] = {"prompts": len(set(prompts)), "cells": len(cells), "lost": sum(lost)}
    if any(lost) and not all(lost):
        found[DROPPED] = _auroc_interval([row[str(rate)]["dropped"] for _, row, rate in cells], lost, prompts)
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """AUROC by signal, and the rules, mixed and by group of kinds."""
    new = [row for row in rows if "half" not in row]
    report: dict[str, Any] = {"n": len(rows)}
    for part, own in {"new": new, "all": rows}.items():
        found = {"all": _auroc_of(own, RATES), **{str(rate): _auroc_of(own, [rate]) for rate in LADDER}}
        report[f"auroc, {part}"] = found
        print(f"AUROC, {part:8s}{found['all']}")
    ruled = [row for row in rows if all(_has_cell(row, rate) for rate in LADDER)]
    parts = {"all": ruled, "new": [row for row in ruled if "half" not in row]}
    parts |= {name: [row for row in ruled if row["kind"] in kinds] for name, kinds in GROUPS.items()}
    for name, own in parts.items():
        if not own:
            continue
        rules = {f"always {rate}": _rule(own, lambda row, rate=rate: (rate, 0)) for rate in LADDER}  # type: ignore[misc]
        rules |= {
            f"{DROPPED} {threshold}": _rule(own, lambda row, t=threshold: ladder(row, t))  # type: ignore[misc]
            for threshold in THRESHOLDS
        }
        report[name] = rules
        for rule, told in rules.items():
            print(f"{name:14s}{rule:24s}{told}")
    return report
