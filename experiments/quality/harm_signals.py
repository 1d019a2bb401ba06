"""Can anything known before the answer tell the prompts that pruning hurts, WITHIN a kind of task?

A signal that tells kinds apart looks good over all prompts and is of no use: what is asked is whether to prune this
prompt. So the area under the ROC curve is taken within each kind that has harmed and unharmed prompts, and averaged
by the number of pairs; the one over all prompts stands beside it for comparison. All signals together, as a logistic
regression, are judged on kinds that it was not trained on. A prompt counts as harmed where the mean KL of the answer
to dense prefill's is over a threshold, and, separately, where dense is right and sparse is not. 95 % intervals are
bootstrapped over prompts within kinds. Prints a table; --out has JSON.
"""

from __future__ import annotations

import argparse
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
_NUM_DRAWS = 500


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


def analyse(rows: Sequence[Mapping[str, float]], harmed: Sequence[bool], kinds: Sequence[str]) -> dict[str, Any]:
    """Areas under the curve of every signal and of all together, within kinds and over all prompts."""
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {
        "all, other kinds' fit": leave_one_out(rows, harmed, kinds)
    }
    report: dict[str, Any] = {"harmed": sum(harmed), "prompts": len(harmed), "signals": {}}
    for name, values in columns.items():
        area, by_kind = within_kinds(values, harmed, kinds)
        # The sign of a single signal is chosen by its own data, which favours it.
        if area < 0.5 and not name.startswith("all"):
            values, area = [-value for value in values], 1 - area
            by_kind = {kind: 1 - value for kind, value in by_kind.items()}
        report["signals"][name] = {
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
    rows, kinds, by_kl, by_answer, right = [], [], [], [], []
    for num_tokens in arguments.tokens:
        for task in tqdm(
            make_tasks(pair, texts, num_tokens, arguments.prompts, arguments.half, arguments.seed), leave=False
        ):
            signals, kept = signals_of(pair, task, config)
            judge = Judge(pair, task, config.prefill_chunk)
            answer = judge.judge(kept)
            rows.append(signals)
            kinds.append(task.kind)
            by_kl.append(answer.kl > arguments.kl)
            by_answer.append(answer.score < 1)
            if judge.dense_score == 1:
                right.append(len(rows) - 1)
    reports = {f"KL over {arguments.kl}": analyse(rows, by_kl, kinds)}
    # Only a prompt that dense prefill answers can lose its answer.
    if any(by_answer[index] for index in right):
        reports["answer lost"] = analyse(
            [rows[i] for i in right], [by_answer[i] for i in right], [kinds[i] for i in right]
        )
    for name, report in reports.items():
        print(format_report(name, report))
    line = {
        "experiment": "harm_signals",
        **describe(),
        "keep_rate": arguments.keep_rate,
        "half": arguments.half,
        "reports": reports,
    }
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
