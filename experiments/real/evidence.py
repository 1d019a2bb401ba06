"""Measure what of the evidence each selection rule keeps, over prompts that a draft has been over once (captures.py).

Recall: the share of prompts of which every token of the evidence is kept (of QMSum, whose evidence is long, the share
of its tokens). Rules: the paper's, BM25, the default, chosen heads, and each part of these taken away. Intervals: 95 %,
by drawing documents again. Needs no model. Prints a table, ends in one JSON line.

    python -m experiments.real.evidence --data DATA --target TARGET --captures FOLDER --num-tokens 2048
        [--calibration FILE]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.captures import Encoded, Looks, add_arguments, encode, file_of, kept_positions, prompts_of, read
from experiments.real.evidence_prompts import OTHER_WORDS
from spec_stack import PrefillConfig
from spec_stack.cli.arguments import heads
from spec_stack.hf.loading import load_tokenizer
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.calibration import Calibration

RATES = (0.05, 0.1, 0.2, 0.3)
QMSUM_RATES = (0.0625, 0.125, 0.25, 0.5)
_DRAWS = 2000


def rules(chosen: Sequence[tuple[int, int]] | None) -> dict[str, PrefillConfig]:
    """The rules by name; those with chosen heads where some are given."""
    paper, default = PrefillConfig.full_look_ahead(), PrefillConfig()
    found = {
        "paper": paper,
        "BM25, chunks": replace(paper, scorer="bm25"),
        "BM25, lines": replace(default, scorer="bm25"),
        "anchors, lines": replace(default, scorer="anchors"),
        "default": default,
        "default - lines": replace(default, unit="chunks"),
        "default - skipped layers": replace(default, skipped_layers=0),
        "default, the look-ahead asks": replace(default, scoring_queries="look_ahead"),
        "default, shares": replace(default, head_vote="share"),
        "default + BM25": replace(default, scorer="attention_bm25"),
    }
    if chosen:
        whole = replace(default, scoring_heads=tuple(chosen), head_vote="share", scorer="attention_bm25")
        found |= {
            "heads": whole,
            "heads - BM25": replace(whole, scorer="attention"),
            "heads - lines": replace(whole, unit="chunks"),
            "heads - lines - BM25": replace(whole, unit="chunks", scorer="attention"),
            "heads - shares": replace(whole, head_vote="max"),
            "heads, the look-ahead asks": replace(whole, scoring_queries="look_ahead"),
            "heads, anchors for BM25": replace(whole, scorer="fused"),
        }
    return found


def kept_share(encoded: Encoded, looks: Looks, config: PrefillConfig, rate: float) -> float:
    """Return the share of the evidence's tokens that is kept."""
    kept = {*kept_positions(encoded, looks, replace(config, keep_rate=rate), _importance)}
    wanted = {at for start, stop in encoded.spans for at in range(start, stop)}
    return len(wanted & kept) / len(wanted)


_importances: dict[tuple[Any, ...], torch.Tensor] = {}


def _importance(attention: CapturedAttention, config: PrefillConfig) -> torch.Tensor:
    """A look's importance, which many settings share, computed once."""
    key = (
        id(attention),
        config.scoring_heads,
        config.head_vote,
        config.skipped_layers,
        config.pool_kernel,
        config.forced_tokens,
    )
    if key not in _importances:
        _importances[key] = attention.importance(config)
    return _importances[key]


def interval(values: Sequence[float], sources: Sequence[str], seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % interval, by drawing sources with all their prompts."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for value, source in zip(values, sources, strict=True):
        by_source[source].append(value)
    sums = np.array([[sum(own), len(own)] for own in by_source.values()])
    drawn = np.random.default_rng(seed).integers(len(sums), size=(_DRAWS, len(sums)))
    totals = sums[drawn].sum(1)
    low, high = np.percentile(totals[:, 0] / totals[:, 1], [2.5, 97.5])
    return float(np.mean(values)), float(low), float(high)


def table(rows: Mapping[str, Mapping[float, list[float]]], sources: Sequence[str]) -> dict[str, Any]:
    """Print recall by rule and rate, with intervals; the same as plain values."""
    report = {}
    for name, by_rate in rows.items():
        cells = {str(rate): [round(each, 3) for each in interval(values, sources)] for rate, values in by_rate.items()}
        report[name] = cells
        print(f"{name:34s}" + "  ".join(f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in cells.values()))
    return report


def by_kind(rows: Mapping[str, Mapping[float, list[float]]], kinds: Sequence[str]) -> dict[str, Any]:
    """Print recall by kind at 0.1 and 0.2 of some rules; the same as plain values."""
    report: dict[str, Any] = {}
    shown = [name for name in ("paper", "BM25, lines", "default", "heads", "calibrated") if name in rows]
    for kind in dict.fromkeys(kinds):
        own = [at for at, each in enumerate(kinds) if each == kind]
        cells = {
            name: [round(float(np.mean([rows[name][rate][at] for at in own])), 3) for rate in (0.1, 0.2)]
            for name in shown
        }
        report[kind] = {"n": len(own), **cells}
        print(f"{kind:24s} n={len(own):3d}  " + "  ".join(f"{name} {a:.2f}/{b:.2f}" for name, (a, b) in cells.items()))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--captures", type=Path, required=True, help="folder that captures.py wrote")
    parser.add_argument("--heads", type=heads, help="chosen heads as layer.head,layer.head")
    parser.add_argument("--calibration", type=Path, help="file of `spec-stack calibrate`, judged beside the rules")
    parser.add_argument("--only", help="rules to judge, by a part of their names")
    add_out_argument(parser)
    arguments = parser.parse_args()
    known = rules(arguments.heads)
    if arguments.calibration:
        known["calibrated"] = Calibration.load(arguments.calibration).apply()
    chosen = {name: config for name, config in known.items() if (arguments.only or "") in name}
    rates = QMSUM_RATES if arguments.qmsum else RATES
    rows: dict[str, dict[float, list[float]]] = {name: {rate: [] for rate in rates} for name in chosen}
    kinds: list[str] = []
    sources: list[str] = []
    tokenizer = load_tokenizer(str(arguments.target))
    for prompt in prompts_of(arguments, tokenizer):
        path = file_of(arguments.captures, prompt)
        if not path.exists() or len(kinds) == arguments.limit:
            continue
        encoded, looks = encode(tokenizer, prompt), read(path)
        _importances.clear()
        for name, config in chosen.items():
            for rate in rates:
                share = kept_share(encoded, looks, config, rate)
                rows[name][rate].append(share if arguments.qmsum else float(share == 1))
        kinds.append(prompt.kind)
        sources.append(prompt.source)
    if not kinds:
        raise ValueError(f"{arguments.captures} holds none of these prompts; run experiments.real.captures first")
    print(
        f"{len(kinds)} prompts of about {arguments.num_tokens} tokens, {len(set(sources))} documents; kept at {rates}"
    )
    report: dict[str, Any] = {"experiment": "evidence", **describe(), "n": len(kinds), "documents": len(set(sources))}
    report["num_tokens"], report["recall"] = arguments.num_tokens, table(rows, sources)
    if not arguments.qmsum:
        report["by_kind"] = by_kind(rows, kinds)
        others = [at for at, kind in enumerate(kinds) if kind in OTHER_WORDS]
        report["other_words"] = {
            name: {str(rate): round(float(np.mean([values[at] for at in others])), 3) for rate, values in cells.items()}
            for name, cells in rows.items()
        }
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
