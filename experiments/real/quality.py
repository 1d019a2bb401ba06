"""LongBench and multi-hop sets by LongBench's metrics: what a target answers from what a rule kept, over what it
answers from everything.

Arms: dense; dense at positions a few further on, which rotary attention does not see but rounds otherwise, so that it
says how much a score moves by nothing; random lines and BM25 at 0.2; the default and a calibration at several rates.
Draft and target go over a prompt as in answers.py. Answers are as long as LongBench lets them be, or `--max-tokens`
where that is less. A row is printed after every prompt; a run goes on where it ended. Intervals: 95 %, by drawing
prompts again, paired with dense. Ends in one JSON line.

    python -m experiments.real.quality dev.jsonl --target TARGET --draft DRAFT --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from experiments.common import script
from experiments.common.bootstrap import mean_interval, ratio_interval
from experiments.common.environment import note_pair
from experiments.real.answers import DENSE, Arm, Asked, Bench
from experiments.real.longbench import KINDS, LongBenchTask, check_metrics, read_tasks, score
from experiments.real.scoring import Encoded, add_scorer_arguments, calibrated
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.prompt import PromptSource, encode_prompt
from spec_stack.tokenizers.prompt_reader import PromptReader

NOISE, RANDOM = "dense, other rounding", "random 0.2"


def arms_of(calibration: Path | None) -> dict[str, Arm]:
    """The arms by name."""
    default = PrefillConfig()
    at_0_2 = replace(default, keep_rate=0.2)
    found = {DENSE: Arm(), NOISE: Arm(shift=7), RANDOM: Arm(at_0_2, is_random=True)}
    found["BM25 0.2"] = Arm(replace(at_0_2, scorer="bm25"))
    found |= {f"default {rate}": Arm(replace(default, keep_rate=rate)) for rate in (0.1, 0.2, 0.3)}
    if calibration:
        rule = calibrated(calibration)
        found |= {f"calibrated {rate}": Arm(replace(rule, keep_rate=rate)) for rate in (0.1, 0.2, 0.3)}
    return found


def encode(tokenizer: Any, task: LongBenchTask) -> Encoded:
    """A prompt as LongBench asks it: as a user's message, or as plain text."""
    messages = None if task.is_raw else [{"role": "user", "content": task.prompt}]
    made = encode_prompt(
        tokenizer, len(tokenizer), PromptSource(prompt=task.prompt if task.is_raw else None, messages=messages)
    )
    reader = PromptReader(tokenizer)
    return Encoded(reader.with_pieces(reader.read(made.token_ids, written=made.turns if made.text else None)))


def run(arguments: argparse.Namespace, tasks: Sequence[LongBenchTask], rows: Rows, names: Sequence[str]) -> None:
    """Answer what is left of the prompts."""
    every, bench = arms_of(arguments.calibration), Bench.load(arguments)
    tokenizer = bench.scorer.pair.tokenizer
    for task in tasks:
        left = rows.left(task.name, {name: every[name] for name in names})
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, task)
        max_tokens = min(task.max_tokens, arguments.max_tokens)
        dense = bench.answer_densely(encoded, max_tokens)
        asked = Asked(encoded, dense, {name: arm for name, arm in left.items() if name != DENSE})
        for answer in [*([dense] if DENSE in left else []), *bench.answer([asked], max_tokens)[0]]:
            found = {"task": task.task, "num_tokens": len(encoded.token_ids), "num_kept": len(answer.kept)}
            scored = {"score": round(score(task, answer.text), 4), "loss": round(answer.loss, 4), "text": answer.text}
            rows.add(task.name, answer.arm, {**found, **scored})
        told = "  ".join(f"{name} {rows.of_arm(name)[task.name]['score']:.2f}" for name in left)
        print(f"{task.name:24s}{told}  {process_time() - began:.0f} CPU s", flush=True)


def compare(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Scores of some prompts, and what they are over dense, with an interval."""
    over = mean_interval([row["score"] - dense["score"] for dense, row in pairs])
    mean = float(np.mean([row["score"] for _, row in pairs]))
    return {"n": len(pairs), "score": round(mean, 4), "over_dense": [round(each, 4) for each in over]}


def summary(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Mean scores by arm and kind, each arm over dense, paired."""
    report: dict[str, Any] = {}
    for name in names:
        pairs = rows.pairs(DENSE, name)
        if not pairs:
            continue
        share = ratio_interval([row["score"] for _, row in pairs], [dense["score"] for dense, _ in pairs])
        by_kind = {kind: [pair for pair in pairs if pair[1]["task"] in tasks] for kind, tasks in KINDS.items()}
        report[name] = {
            **compare(pairs),
            "share_of_dense": [round(each, 3) for each in share],
            "kept": round(sum(row["num_kept"] for _, row in pairs) / sum(row["num_tokens"] for _, row in pairs), 3),
            "loss_over_dense": round(float(np.mean([row["loss"] - dense["loss"] for dense, row in pairs])), 3),
            "same_text": sum(dense["text"] == row["text"] for dense, row in pairs),
            "by_kind": {kind: compare(own) for kind, own in by_kind.items() if own},
        }
        found, told = "{:.3f} [{:.3f}, {:.3f}]".format(*report[name]["share_of_dense"]), report[name]["by_kind"].items()
        kinds = "  ".join(f"{kind} {own['score']:.2f} ({own['n']})" for kind, own in told)
        print(f"{name:22s} n={len(pairs):3d}  score {report[name]['score']:.3f}  of dense {found}  {kinds}")
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("data", type=Path, help="file of LongBench's prompts")
    add_scorer_arguments(parser)
    parser.add_argument("--arms", nargs="+", help="arms to run, dense first (default: all)")
    parser.add_argument("--to-tokens", type=int, default=4096, help="longest prompt (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (%(default)s)")
    script.add_row_arguments(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    known = list(arms_of(arguments.calibration))
    names = arguments.arms or known
    if unknown := set(names) - set(known):
        raise ValueError(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    fitting = [task for task in read_tasks(arguments.data) if task.num_tokens <= arguments.to_tokens]
    tasks = sorted(fitting, key=lambda task: task.num_tokens)[: arguments.limit]
    check_metrics(tasks)
    keys, rows = [task.name for task in tasks], Rows(arguments.rows, arguments.minutes)
    if rows.num_left(keys, names):
        run(arguments, tasks, rows, names)
    report = {"to_tokens": arguments.to_tokens, "max_tokens": arguments.max_tokens}
    report |= {"num_left": rows.num_left(keys, names), "arms": summary(rows, names)}
    script.print_report("longbench", report, arguments.out)


if __name__ == "__main__":
    script.run(main)
