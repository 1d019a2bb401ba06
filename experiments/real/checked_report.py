"""What the rows of checked.py tell: AUROC of the draft's signals, and what a ladder of keep rates loses and gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_stack.bench.rows import Row
from spec_stack.binomial import upper_bound

RATES = (0.1, 0.2, 0.4)
LOST_NATS = 0.3
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
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


def _mean(name: str, length: int | None = None) -> Callable[[Row], float]:
    return lambda told: float(np.mean(told["signals"][name][:length]))


def _by_confidence(told: Row) -> float:
    weights = np.array(told["signals"]["sure"])
    return float((weights * np.array(told["signals"]["kl"])).sum() / weights.sum())


SIGNALS: dict[str, Callable[[Row], float]] = {
    **{f"KL, first {length}": _mean("kl", length) for length in (1, 2, 4, 8, 16, 32)},
    "KL, largest": lambda told: max(told["signals"]["kl"]),
    "KL by confidence": _by_confidence,
    "KL at temperature 2": _mean("kl_hot"),
    "KL at temperature 0.5": _mean("kl_cold"),
    "reverse KL": _mean("reverse"),
    "JS": _mean("js"),
    "loss of the draft": _mean("drop"),
    "share of other tokens": _mean("differs"),
}


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


def ladder(row: Row, threshold: float, signal: Callable[[Row], float]) -> tuple[float | None, list[float]]:
    """The rate that the check keeps (None: the whole prompt), and those that it tries."""
    tried = []
    for rate in RATES:
        tried.append(rate)
        if signal(row[str(rate)]) <= threshold:
            return rate, tried
    return None, tried


def cost(row: Row, rate: float | None, tried: Sequence[float] = ()) -> float:
    """Processor seconds to the first token; tried: rates that the draft reads for the check."""
    seconds: float = row["scoring_s"] + (row["look_ahead_s"] if tried else 0)
    seconds += sum(row[str(each)]["reading_s"] for each in tried)
    if rate is None:
        return seconds + float(row["dense_s"])
    # The highest rate is not always read.
    known = row[str(rate)].get("sparse_s")
    return seconds + float(
        known if known is not None else row["dense_s"] * row[str(rate)]["num_kept"] / row["num_tokens"]
    )


def _rule(rows: Sequence[Row], choose: Callable[[Row], tuple[float | None, list[float]]]) -> dict[str, Any]:
    chosen = [choose(row) for row in rows]
    lost = [rate is not None and is_lost(row, rate) for row, (rate, _) in zip(rows, chosen, strict=True)]
    dense = sum(row["dense_s"] for row in rows)
    spent = sum(cost(row, rate, tried) for row, (rate, tried) in zip(rows, chosen, strict=True))
    return {
        "n": len(rows),
        "lost": int(sum(lost)),
        "lost_at_most": round(upper_bound(int(sum(lost)), len(rows)), 3),
        "refused": round(float(np.mean([rate is None for rate, _ in chosen])), 3),
        "over_dense": round(dense / spent, 2),
        "mean_loss": round(
            float(
                np.mean([0.0 if rate is None else loss(row, rate) for row, (rate, _) in zip(rows, chosen, strict=True)])
            ),
            3,
        ),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """AUROC by signal, and the rules, mixed and by group of kinds."""
    cells = [(at, row, rate) for at, row in enumerate(rows) for rate in RATES if "logprobs" in row[str(rate)]]
    labels = [is_lost(row, rate) for _, row, rate in cells]
    aurocs = {
        name: _auroc_interval([signal(row[str(rate)]) for _, row, rate in cells], labels, [at for at, _, _ in cells])
        for name, signal in SIGNALS.items()
    } if any(labels) else {}  # fmt: skip
    report: dict[str, Any] = {"n": len(rows), "cells": len(cells), "lost_cells": sum(labels), "auroc": aurocs}
    parts = {"all": list(rows)}
    parts |= {name: [row for row in rows if row["kind"] in kinds] for name, kinds in GROUPS.items()}
    for name, own in parts.items():
        if not own:
            continue
        rules = {f"always {rate}": _rule(own, lambda row, rate=rate: (rate, [])) for rate in RATES}  # type: ignore[misc]
        for length in (8, 16, 32):
            signal = SIGNALS[f"KL, first {length}"]
            rules |= {
                f"{length} tokens, {threshold}": _rule(own, lambda row, t=threshold, s=signal: ladder(row, t, s))  # type: ignore[misc]
                for threshold in THRESHOLDS
            }
        report[name] = rules
        for rule, told in rules.items():
            print(f"{name:14s}{rule:18s}{told}")
    for name, auroc in aurocs.items():
        print(f"{name:24s}{auroc}")
    return report
