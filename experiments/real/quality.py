"""LongBench by its own metrics: what a target answers from what a rule kept, over what it answers from everything.

Arms: dense; dense at positions a few further on, which rotary attention does not see but rounds otherwise, so that it
says how much a score moves by nothing; random lines and BM25 at 0.2; the default and a calibration at several rates.
The draft goes over every prompt once, and what it captured is kept (captures.py); the target goes over the kept tokens
at their own positions by transformers alone, greedily; the arms of a prompt decode side by side. Answers are as long as
LongBench lets them be, or `--max-tokens` where that is less. A row is printed after every prompt; a run goes on where
it ended. Intervals: 95 %, by drawing prompts again, paired with dense. Ends in one JSON line.

    python -m experiments.real.quality dev.jsonl --target TARGET --draft DRAFT --captures FOLDER --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from experiments.common.bootstrap import ratio_interval
from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.answers import DENSE, Prefilled, Target
from experiments.real.captures import Encoded, kept_positions, look, read, write
from experiments.real.evidence import interval
from experiments.real.longbench import KINDS, LongBenchTask, check_metrics, read_tasks, score
from experiments.real.rows import Row, Rows, add_row_arguments
from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.prompt import PromptSource, encode_prompt
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.calibration import Calibration
from spec_stack.tokenizers.pieces import Pieces

NOISE, RANDOM = "dense, other rounding", "random 0.2"
_SHIFT = 7


def arms_of(calibration: Path | None) -> dict[str, PrefillConfig | None]:
    """What each arm keeps; None: everything."""
    default = PrefillConfig()
    at_0_2 = replace(default, keep_rate=0.2)
    found: dict[str, PrefillConfig | None] = {DENSE: None, NOISE: None, RANDOM: at_0_2}
    found["BM25 0.2"] = replace(at_0_2, scorer="bm25")
    found |= {f"default {rate}": replace(default, keep_rate=rate) for rate in (0.1, 0.2, 0.3)}
    if calibration:
        chosen = replace(Calibration.load(calibration).apply(), draft_window=None)
        found |= {f"calibrated {rate}": replace(chosen, keep_rate=rate) for rate in (0.1, 0.2)}
    return found


def encode(tokenizer: Any, task: LongBenchTask) -> Encoded:
    """A prompt as LongBench asks it: as a user's message, or as plain text."""
    messages = None if task.is_raw else [{"role": "user", "content": task.prompt}]
    made = encode_prompt(
        tokenizer, len(tokenizer), PromptSource(prompt=task.prompt if task.is_raw else None, messages=messages)
    )
    return Encoded(made.token_ids, made.protected, (), Pieces(tokenizer).of(made.token_ids))


def capture(arguments: argparse.Namespace, tasks: Sequence[LongBenchTask]) -> None:
    """Pass the draft over the prompts that it has not been over."""
    left = [task for task in tasks if not file_of(arguments.captures, task).exists()]
    if not left:
        return
    arguments.captures.mkdir(parents=True, exist_ok=True)
    precision = arguments.precision
    pair = ModelPair.load(
        arguments.target, arguments.draft, precision=precision, draft_precision=precision, target_weights=False
    )
    for task in left:
        began, encoded = process_time(), encode(pair.tokenizer, task)
        write(file_of(arguments.captures, task), look(pair, pair.open_index(PrefillConfig.prefill_chunk), encoded))
        num_tokens = len(encoded.token_ids)
        print(f"{task.name:24s} captured  {num_tokens} tokens  {process_time() - began:.0f} CPU s", flush=True)


def file_of(folder: Path, task: LongBenchTask) -> Path:
    return folder / f"{task.name}.safetensors"


def _random(attention: CapturedAttention, config: PrefillConfig) -> torch.Tensor:
    num_tokens = len(attention.importance(config))
    return torch.rand(num_tokens, generator=torch.Generator().manual_seed(num_tokens))


def prefill(
    target: Target, encoded: Encoded, captures: Path, arms: Mapping[str, PrefillConfig | None]
) -> list[tuple[Prefilled, int]]:
    """The target over what each arm keeps, and how many tokens that is."""
    looks, ids, made = read(captures), encoded.token_ids, []
    for name, config in arms.items():
        positions: Sequence[int] = range(len(ids))
        if config is not None:
            importance = _random if name == RANDOM else CapturedAttention.importance
            positions = kept_positions(encoded, looks, config, importance)
        made.append((target.prefill(ids, positions, _SHIFT if name == NOISE else 0), len(positions)))
    return made


def run(arguments: argparse.Namespace, tasks: Sequence[LongBenchTask], rows: Rows, names: Sequence[str]) -> None:
    """Answer what is left of the prompts."""
    tokenizer, target = load_tokenizer(str(arguments.target)), Target(arguments.target, arguments.precision)
    every = arms_of(arguments.calibration)
    wanted = {name: every[name] for name in names}
    for task in tasks:
        left = rows.left(task.name, wanted)
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, task)
        prefilled = prefill(target, encoded, file_of(arguments.captures, task), left)
        most = min(task.max_tokens, arguments.max_tokens)
        answers = target.decode([arm for arm, _ in prefilled], most)
        for name, (_, num_kept), answer in zip(left, prefilled, answers, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            found = {"task": task.task, "num_tokens": len(encoded.token_ids), "num_kept": num_kept}
            rows.add(task.name, name, {**found, "score": round(score(task, text), 4), "text": text})
        told = "  ".join(f"{name} {rows.of_arm(name)[task.name]['score']:.2f}" for name in left)
        print(f"{task.name:24s}{told}  {process_time() - began:.0f} CPU s", flush=True)


def compare(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Scores of some prompts, and what they are over dense, with an interval."""
    differences = [row["score"] - dense["score"] for dense, row in pairs]
    over = interval(differences, [row["key"] for _, row in pairs])
    return {
        "n": len(pairs),
        "score": round(float(np.mean([row["score"] for _, row in pairs])), 4),
        "over_dense": [round(each, 4) for each in over],
    }


def share(pairs: Sequence[tuple[Row, Row]]) -> list[float]:
    """An arm's score over dense, and its interval."""
    found = ratio_interval([row["score"] for _, row in pairs], [dense["score"] for dense, _ in pairs])
    return [round(each, 3) for each in found]


def summary(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Mean scores by arm, kind and task, each arm over dense, paired."""
    report: dict[str, Any] = {}
    for name in names:
        pairs = rows.pairs(DENSE, name)
        if not pairs:
            continue

        def only(names: Collection[str], pairs: Sequence[tuple[Row, Row]] = pairs) -> dict[str, Any]:
            return compare([pair for pair in pairs if pair[1]["task"] in names])

        tasks = {row["task"] for _, row in pairs}
        report[name] = {
            **compare(pairs),
            "share_of_dense": share(pairs),
            "kept": round(sum(row["num_kept"] for _, row in pairs) / sum(row["num_tokens"] for _, row in pairs), 3),
            "same_text": sum(dense["text"] == row["text"] for dense, row in pairs),
            "by_kind": {kind: only(own) for kind, own in KINDS.items() if tasks & own},
            "by_task": {task: only({task}) for task in sorted(tasks)},
        }
        found, told = "{:.3f} [{:.3f}, {:.3f}]".format(*report[name]["share_of_dense"]), report[name]["by_kind"].items()
        kinds = "  ".join(f"{kind} {own['score']:.2f} ({own['n']})" for kind, own in told)
        print(f"{name:22s} n={len(pairs):3d}  score {report[name]['score']:.3f}  of dense {found}  {kinds}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file of LongBench's prompts")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--captures", type=Path, required=True, help="folder for what the draft captures")
    parser.add_argument("--calibration", type=Path, help="a calibration's file or folder, for two more arms")
    parser.add_argument("--arms", nargs="+", help="arms to run, dense first (default: all)")
    parser.add_argument("--from-tokens", type=int, default=0, help="pass over shorter prompts")
    parser.add_argument("--to-tokens", type=int, default=4096, help="longest prompt (%(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    add_row_arguments(parser)
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    known = list(arms_of(arguments.calibration))
    names = arguments.arms or known
    if unknown := set(names) - set(known):
        raise ValueError(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    fitting = [task for task in read_tasks(arguments.data) if arguments.from_tokens <= task.num_tokens]
    tasks = sorted((task for task in fitting if task.num_tokens <= arguments.to_tokens), key=lambda it: it.num_tokens)
    tasks = tasks[: arguments.limit]
    check_metrics(tasks)
    rows = Rows(arguments.rows, arguments.minutes)
    left = [task for task in tasks if any((task.name, name) not in rows for name in names)]
    if left:
        torch.set_num_threads(arguments.threads)
        capture(arguments, left)
        run(arguments, left, rows, names)
    num_left = sum((task.name, name) not in rows for task in tasks for name in names)
    lengths = {"from_tokens": arguments.from_tokens, "to_tokens": arguments.to_tokens}
    report = {"experiment": "longbench", **describe(), **lengths, "max_tokens": arguments.max_tokens}
    print_report({**report, "num_left": num_left, "arms": summary(rows, names)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
