"""Can anything known before the answer tell the prompts that pruning hurts, WITHIN a kind of task?

A signal that tells kinds apart looks good over all prompts and is of no use: what is asked is whether to prune this
prompt. So the area under the ROC curve is taken within each kind that has harmed and unharmed prompts, and averaged
by the number of pairs; the one over all prompts stands beside it for comparison. All signals together, as a logistic
regression, are judged on kinds that it was not trained on. A prompt counts as harmed where the mean KL of the answer
to dense prefill's is over a threshold, and, separately, where dense is right and sparse is not. 95 % intervals are
bootstrapped over prompts within kinds. Prints a table; --out has JSON, with a row per prompt.

Whether a large or a small value speaks of harm is chosen, signal by signal, by the prompts at hand, which favours the
signal. --learn-from FILE takes it from an earlier report instead (of --half tuning, say), and the line to draw as well:
then it also says what a floor by each signal would gain, the suspected quarter or half of the prompts being prefilled
densely, over as many prompts of the same kinds taken by chance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.quality.head_to_head import Judge, Task, make_tasks, read_calibrated
from experiments.quality.selection_suite import read_texts
from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.pair import ModelPair
from spec_stack.prefill.chunks import SCORERS, Evidence
from spec_stack.prefill.scoring import score
from spec_stack.prefill.selection import select_chunks

# An area under the curve from which a signal would be worth an option.
WORTH_IT = 0.7
# Shares of the prompts that a floor prefills densely.
FLOORS = (0.25, 0.5)
_NUM_DRAWS = 500
_ALL = "all, other kinds' fit"


def signals_of(pair: ModelPair, task: Task, config: PrefillConfig) -> tuple[dict[str, float], set[int]]:
    """What is known of a prompt once the draft has scored it and the target has verified the look-ahead, and what a
    selection keeps. Larger means "safer to prune" for none of them in particular: an area under 0.5 is turned round."""
    ids = task.prompt.token_ids
    draft = pair.open_draft(config.prefill_chunk)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=pair.end_ids)
    importance, proposal = score(draft, ids, look_ahead, config)
    evidence = Evidence(ids, importance)
    votes = SCORERS[config.scorer](evidence, config)
    size, rate = config.chunk_size, config.rate_for(len(ids))
    chunks = select_chunks(votes, config, rate)
    kept = {at for chunk in chunks for at in range(chunk * size, min(len(ids), (chunk + 1) * size))}
    positions = sorted(kept)
    shares = (importance / importance.sum()).double()
    words = select_chunks(SCORERS["anchors"](evidence, config), config, rate)
    ranked = votes.sort(descending=True).values
    border = len(chunks)
    target = pair.open_target(config.prefill_chunk)
    start = len(ids)
    rows = target.forward(
        [*(ids[at] for at in positions), *proposal.token_ids],
        [*positions, *range(start, start + len(proposal.token_ids))],
        len(proposal.token_ids) + 1,
    )
    chosen = rows.argmax(dim=-1).tolist()
    num_accepted = 0
    while num_accepted < len(proposal.token_ids) and chosen[num_accepted] == proposal.token_ids[num_accepted]:
        num_accepted += 1
    pruned = pair.open_draft(config.prefill_chunk)
    again = pruned.forward(
        [*(ids[at] for at in positions), *proposal.token_ids],
        [*positions, *range(start, start + len(proposal.token_ids))],
        len(proposal.token_ids) + 1,
    )
    whole = pair.open_draft(config.prefill_chunk).forward(
        [*ids, *proposal.token_ids], range(start + len(proposal.token_ids)), len(proposal.token_ids) + 1
    )
    full, part = (each.float().log_softmax(dim=-1) for each in (whole, again))
    probabilities = rows.float().softmax(dim=-1)
    top = probabilities.topk(2, dim=-1).values
    return {
        "look-ahead accepted": num_accepted / max(1, len(proposal.token_ids)),
        "importance entropy": float(-(shares * shares.clamp_min(1e-12).log()).sum()),
        "coverage": float(shares[positions].sum()),
        "top chunk's share": float(ranked[0] / ranked.sum()),
        "gap at the border": float((ranked[border - 1] - ranked[min(border, len(ranked) - 1)]) / ranked[0]),
        "anchors agree": len(set(words) & set(chunks)) / len(chunks),
        "draft's entropy": proposal.signals.mean_entropy,
        "draft's confidence": proposal.signals.min_confidence,
        "draft's KL, full to kept": float((full.exp() * (full - part)).sum(dim=-1).mean()),
        "target's confidence": float(top[:, 0].mean()),
        "target's margin": float((top[:, 0] - top[:, 1]).min()),
        "prompt's length": float(len(ids)),
    }, kept


def auc(values: Sequence[float], harmed: Sequence[bool]) -> float:
    """Chance that a harmed prompt has the larger value; ties count half. NaN without both."""
    positive = np.array([value for value, bad in zip(values, harmed, strict=True) if bad])
    negative = np.array([value for value, bad in zip(values, harmed, strict=True) if not bad])
    if not len(positive) or not len(negative):
        return float("nan")
    above = (positive[:, None] > negative[None]).mean()
    return float(above + 0.5 * (positive[:, None] == negative[None]).mean())


def within_kinds(
    values: Sequence[float], harmed: Sequence[bool], kinds: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """The area under the curve within kinds, weighted by pairs of a harmed and an unharmed prompt; and each kind's."""
    by_kind: dict[str, float] = {}
    total, weight = 0.0, 0
    for kind in dict.fromkeys(kinds):
        own = [index for index, each in enumerate(kinds) if each == kind]
        labels = [harmed[index] for index in own]
        found = auc([values[index] for index in own], labels)
        if np.isnan(found):
            continue
        by_kind[kind] = found
        pairs = sum(labels) * (len(labels) - sum(labels))
        total, weight = total + pairs * found, weight + pairs
    return (total / weight if weight else float("nan")), by_kind


def interval_within(values: Sequence[float], harmed: Sequence[bool], kinds: Sequence[str]) -> tuple[float, float]:
    """95 % bootstrap interval of the area within kinds; prompts are drawn anew within each kind."""
    rng = np.random.default_rng(0)
    groups = [[index for index, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)]
    found = []
    for _ in range(_NUM_DRAWS):
        drawn = [int(index) for group in groups for index in rng.choice(group, len(group))]
        value, _ = within_kinds(
            [values[index] for index in drawn], [harmed[index] for index in drawn], [kinds[index] for index in drawn]
        )
        if not np.isnan(value):
            found.append(value)
    if not found:
        return float("nan"), float("nan")
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def leave_one_out(rows: Sequence[Mapping[str, float]], harmed: Sequence[bool], kinds: Sequence[str]) -> list[float]:
    """Scores of every prompt by a logistic regression on all signals, fitted to the prompts of the other kinds.

    A kind for which the others hold one label alone gets 0 throughout.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = np.array([list(row.values()) for row in rows])
    labels = np.array(harmed)
    scores = np.zeros(len(rows))
    for kind in dict.fromkeys(kinds):
        own = np.array([each == kind for each in kinds])
        if len(set(labels[~own].tolist())) == 2:
            model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
            model.fit(table[~own], labels[~own])
            scores[own] = model.decision_function(table[own])
    return [float(value) for value in scores]


def analyse(
    rows: Sequence[Mapping[str, float]],
    harmed: Sequence[bool],
    kinds: Sequence[str],
    turned: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """Areas under the curve of every signal and of all together, within kinds and over all prompts.

    `turned` says for which signals a small value speaks of harm; without it these prompts do, in the signal's favour.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {_ALL: leave_one_out(rows, harmed, kinds)}
    report: dict[str, Any] = {"harmed": sum(harmed), "prompts": len(harmed), "signals": {}}
    for name, values in columns.items():
        area, by_kind = within_kinds(values, harmed, kinds)
        turn = name != _ALL and (turned[name] if turned is not None else area < 0.5)
        if turn:
            values, area = [-value for value in values], 1 - area
            by_kind = {kind: 1 - value for kind, value in by_kind.items()}
        report["signals"][name] = {
            "turned": turn,
            "within": area,
            "interval": interval_within(values, harmed, kinds),
            "pooled": auc(values, harmed),
            "by_kind": by_kind,
        }
    # A figure over the line by chance is no evidence: its interval must be over chance too.
    report["worth_an_option"] = [
        name for name, found in report["signals"].items() if found["within"] >= WORTH_IT and found["interval"][0] > 0.5
    ]
    return report


def floor_gain(
    suspicion: Sequence[float], line: float, kl: Sequence[float], kinds: Sequence[str]
) -> dict[str, float | tuple[float, float]]:
    """What it gains to prefill densely where the suspicion is at or over a line.

    The share of the prompts that are dense then, of all KL divergence that this removes, the same where as many prompts
    of each kind are taken by chance, and the difference with its 95 % bootstrap interval over prompts within kinds.
    """
    dense = np.array(suspicion) >= line
    cost = np.array(kl)

    def removed(index: np.ndarray, names: np.ndarray) -> tuple[float, float]:
        own, chosen = cost[index], dense[index]
        by_chance = sum(own[names == kind].sum() * chosen[names == kind].mean() for kind in set(names.tolist()))
        return float(own[chosen].sum() / own.sum()), float(by_chance / own.sum())

    labels = np.array(kinds)
    rng = np.random.default_rng(0)
    groups = [np.flatnonzero(labels == kind) for kind in dict.fromkeys(kinds)]
    differences = []
    for _ in range(_NUM_DRAWS):
        drawn = np.concatenate([rng.choice(group, len(group)) for group in groups])
        by_signal, by_chance = removed(drawn, labels[drawn])
        differences.append(by_signal - by_chance)
    by_signal, by_chance = removed(np.arange(len(cost)), labels)
    low, high = np.quantile(differences, (0.025, 0.975))
    return {
        "dense": float(dense.mean()),
        "kl_removed": by_signal,
        "by_chance": by_chance,
        "gain": by_signal - by_chance,
        "interval": (float(low), float(high)),
    }


def floors(
    rows: Sequence[Mapping[str, Any]], learned: Sequence[Mapping[str, Any]], turned: Mapping[str, bool]
) -> dict[str, Any]:
    """`floor_gain` of every signal at the lines over which FLOORS of the learned rows lie."""
    found: dict[str, Any] = {}
    for name, turn in turned.items():
        if name == _ALL:
            continue
        sign = -1.0 if turn else 1.0
        known = np.array([sign * row["signals"][name] for row in learned])
        own = [sign * row["signals"][name] for row in rows]
        kl, kinds = [row["kl"] for row in rows], [row["kind"] for row in rows]
        found[name] = {str(share): floor_gain(own, float(np.quantile(known, 1 - share)), kl, kinds) for share in FLOORS}
    return found


def format_floors(found: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = ["KL removed by prefilling the suspected densely, less what chance removes within kinds"]
    for name, by_share in found.items():
        cells = (
            f"{each['dense']:>6.2f} dense {each['kl_removed']:.2f} - {each['by_chance']:.2f} = {each['gain']:+.2f} "
            f"({each['interval'][0]:+.2f} to {each['interval'][1]:+.2f})"
            for each in by_share.values()
        )
        lines.append(f"{name:28s}" + "".join(cells))
    return "\n".join(lines)


def format_report(name: str, report: Mapping[str, Any]) -> str:
    lines = [
        f"{name}: {report['harmed']} of {report['prompts']} prompts harmed",
        f"{'signal':28s}{'within kinds':>22s}{'pooled':>9s}",
    ]
    for signal, found in report["signals"].items():
        low, high = found["interval"]
        lines.append(f"{signal:28s}{found['within']:>8.2f} ({low:.2f}-{high:.2f}){found['pooled']:>9.2f}")
    lines.append(f"at {WORTH_IT} or more within kinds: {', '.join(report['worth_an_option']) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="needles per length (%(default)s)")
    parser.add_argument("--keep-rate", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--calibration", type=Path, help="a file, or its folder (default: the draft's own, if any)")
    parser.add_argument(
        "--kl", type=float, default=0.05, help="mean KL to dense from which a prompt is harmed (%(default)s)"
    )
    parser.add_argument("--half", choices=["test", "tuning"], default="test")
    parser.add_argument("--texts", type=Path, help="a folder of texts to hide in (default: standard library modules)")
    parser.add_argument("--learn-from", type=Path, help="a report of other prompts: directions and lines come from it")
    parser.add_argument("--seed", type=int, default=21)
    add_out_argument(parser)
    arguments = parser.parse_args()
    pair = load_generator(arguments).pair
    calibrated = read_calibrated(arguments.draft, arguments.calibration) or PrefillConfig()
    # All layers score, so that the look-ahead is there before the selection.
    config = replace(calibrated, keep_rate=arguments.keep_rate, scoring_layers=None)
    if config.scorer == "anchors":
        config = replace(config, scorer="attention")
    texts = read_texts(arguments.texts)
    learned = json.loads(arguments.learn_from.read_text(encoding="utf-8")) if arguments.learn_from else None
    if learned is not None and ("rows" not in learned or f"KL over {arguments.kl}" not in learned["reports"]):
        raise ValueError(f"{arguments.learn_from} has no rows for --kl {arguments.kl}; make it with this script")
    rows: list[dict[str, Any]] = []
    for num_tokens in arguments.tokens:
        for task in tqdm(
            make_tasks(pair, texts, num_tokens, arguments.prompts, arguments.half, arguments.seed), leave=False
        ):
            signals, kept = signals_of(pair, task, config)
            judge = Judge(pair, task, config.prefill_chunk)
            answer = judge.judge(kept)
            rows.append(
                {
                    "kind": task.kind,
                    "tokens": len(task.prompt.token_ids),
                    "kl": answer.kl,
                    "score": answer.score,
                    "dense_score": judge.dense_score,
                    "signals": signals,
                }
            )
    # Only a prompt that dense prefill answers can lose its answer.
    right = [row for row in rows if row["dense_score"] == 1]
    cases = {f"KL over {arguments.kl}": (rows, [row["kl"] > arguments.kl for row in rows])}
    if any(row["score"] < 1 for row in right):
        cases["answer lost"] = (right, [row["score"] < 1 for row in right])
    reports: dict[str, Any] = {}
    for name, (those, harmed) in cases.items():
        before = learned["reports"].get(name) if learned is not None else None
        turned = before and {signal: found["turned"] for signal, found in before["signals"].items()}
        reports[name] = analyse([row["signals"] for row in those], harmed, [row["kind"] for row in those], turned)
    for name, report in reports.items():
        print(format_report(name, report))
    gains = None
    if learned is not None:
        by_kl = learned["reports"][f"KL over {arguments.kl}"]["signals"]
        gains = floors(rows, learned["rows"], {signal: found["turned"] for signal, found in by_kl.items()})
        print(format_floors(gains))
    line = {
        "experiment": "harm_signals",
        **describe(),
        "keep_rate": arguments.keep_rate,
        "half": arguments.half,
        "reports": reports,
        "floors": gains,
        "rows": rows,
    }
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
