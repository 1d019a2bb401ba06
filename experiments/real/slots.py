"""What a draft over chosen slots gets right of a target's answers to prompts that chose nothing about it.

The answers are LongBench's, as the dense arm of quality.py gave them: documents to summarise, dialogues, code. The
draft alone runs, fed the given answer in steps of --gamma tokens, over the whole prompt ("full"), a window of as many
slots ("window") and the library's own slots, chosen anew as the answer grows ("chosen"). "right" is the share of places
where its likeliest token is the answer's, "accepted" what a decoder with a fixed gamma would accept of its proposals.
Text is tokenized again, which may split it otherwise than the target wrote it, alike for all. A row per prompt and arm;
resumable. --slots adds arms with other numbers of slots.

With --collapse the prompts are modules of the standard library, and the answers the tokens of decode_collapse's plain
runs, in place of LongBench's.

    python -m experiments.real.slots dev.jsonl --draft DRAFT --answers longbench.jsonl --rows ROWS.jsonl
    python -m experiments.real.slots --draft DRAFT --collapse COLLAPSE_ROWS.jsonl --slots 256 1024 --rows ROWS.jsonl

Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.answers import DENSE
from experiments.real.longbench import read_tasks
from experiments.real.quality import encode
from experiments.real.rows import Rows, add_row_arguments
from experiments.speed.decode_collapse import documents
from experiments.speed.draft_choice import CHOSEN, Open, arms, interval, right
from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair

# Fewer tokens of an answer show nothing.
_LEAST = 24


def accepted(is_right: Sequence[bool], gamma: int) -> tuple[int, int]:
    """Tokens accepted and proposed, were every step to propose gamma tokens and to end with one of the target's."""
    at = num_accepted = num_proposed = 0
    while at < len(is_right):
        proposal = [*is_right[at : at + gamma], False]
        num_right = proposal.index(False)
        num_accepted, num_proposed = num_accepted + num_right, num_proposed + len(proposal) - 1
        at += num_right + 1
    return num_accepted, num_proposed


def dense_answers(path: Path) -> dict[str, str]:
    """By prompt, what the dense arm of quality.py wrote.

    Raises
    ------
    ValueError
        Where the file has no row of that arm.
    """
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    answers = {row["key"]: row["text"] for row in rows if row["arm"] == DENSE}
    if not answers:
        raise ValueError(f"{path} has no answer of the arm {DENSE!r}; make it with quality.py --arms {DENSE}")
    return answers


Case = tuple[str, list[int], list[int]]
"""A key, a prompt and the target's answer to it."""


def of_longbench(pair: ModelPair, prompts: Path, answers: Path, max_tokens: int) -> Iterator[Case]:
    """LongBench's prompts that a dense arm has answered."""
    texts = dense_answers(answers)
    for task in read_tasks(prompts):
        if task.name in texts:
            answer = pair.tokenizer(texts[task.name], add_special_tokens=False).input_ids[:max_tokens]
            yield task.name, encode(pair.tokenizer, task).token_ids, answer


def of_collapse(pair: ModelPair, rows: Path, max_tokens: int) -> Iterator[Case]:
    """The prompts of decode_collapse that a plain run has answered.

    Raises
    ------
    ValueError
        Where the file has no such row.
    """
    plain = Rows(rows, 0.0).of_arm("plain fixed")
    if not plain:
        raise ValueError(f"{rows} has no plain run; make it with decode_collapse.py --arms plain --policies fixed")
    for key, row in plain.items():
        length, kind, number = key.split(" ")[0], key.split(" ", 1)[1].rpartition(" ")[0], int(key.split(" ")[-1])
        yield key, documents(pair, int(length), number + 1, kind)[number], row["token_ids"][:max_tokens]


def measure(arguments: argparse.Namespace, rows: Rows, open_drafts: Mapping[str, tuple[Open, int]]) -> None:
    """Make the rows that are missing, as long as there is time. open_drafts: by arm, with its slots."""
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.draft, arguments.draft)
    # The target, whose answers are given, never runs.
    pair = ModelPair.load(
        arguments.draft,
        arguments.draft,
        precision=arguments.precision,
        draft_precision=arguments.precision,
        target_weights=False,
    )
    num_done = 0
    cases = (
        of_longbench(pair, arguments.longbench, arguments.answers, arguments.max_tokens)
        if arguments.collapse is None
        else of_collapse(pair, arguments.collapse, arguments.max_tokens)
    )
    for key, prompt, answer in tqdm(cases):
        if num_done == arguments.limit or len(prompt) <= PrefillConfig.draft_slots or len(answer) < _LEAST:
            continue
        num_done += 1
        for arm, (open_draft, num_slots) in rows.left(key, open_drafts).items():
            draft = open_draft(pair, prompt, PrefillConfig(draft_slots=num_slots))
            found = right(draft, prompt, answer, answer, arguments.gamma)
            num_accepted, num_proposed = accepted(found, arguments.gamma)
            values = {"num_right": sum(found), "num_accepted": num_accepted, "num_proposed": num_proposed}
            rows.add(key, arm, {"num_tokens": len(prompt), "num_answer": len(answer), **values})


def summarise(rows: Rows, of_arms: Sequence[str]) -> dict[str, Any]:
    """By arm: mean shares over prompts, and 95 % of bootstrap samples of the difference to "full".

    Raises
    ------
    ValueError
        Where an arm and "full" have no prompt in common.
    """
    report: dict[str, Any] = {"n": len(rows.of_arm("full"))}
    for arm in of_arms:
        own = rows.pairs(arm, "full")
        if not own:
            raise ValueError(
                f"no row of {arm}: --answers holds no long enough answer to one of these prompts, or --minutes ended"
            )
        found: dict[str, Any] = {}
        for name, part, of in (("right", "num_right", "num_answer"), ("accepted", "num_accepted", "num_proposed")):
            shares = [(row[part] / row[of], other[part] / other[of]) for row, other in own]
            found[name] = mean(one for one, _ in shares)
            found[f"{name}_over_full"] = interval([one - other for one, other in shares])
        report[arm] = found
        print(
            f"{arm:12s} right {found['right']:.3f}  accepted {found['accepted']:.3f}  over full: "
            + ", ".join(
                f"{low:+.3f} to {high:+.3f}" for low, high in (found[f"{n}_over_full"] for n in ("right", "accepted"))
            )
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench", type=Path, nargs="?", help="prompts, as quality.py takes them")
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--answers", type=Path, help="rows of quality.py, with its dense arm")
    parser.add_argument("--collapse", type=Path, help="rows of decode_collapse.py with plain runs, in place of both")
    parser.add_argument("--slots", type=int, nargs="*", default=[], help="other numbers of chosen slots, an arm each")
    parser.add_argument("--precision", default="bf16", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--gamma", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (%(default)s)")
    add_row_arguments(parser)
    add_out_argument(parser)
    arguments = parser.parse_args()
    if arguments.collapse is None and not (arguments.longbench and arguments.answers):
        raise ValueError("give LongBench's prompts and --answers, or --collapse")
    rows = Rows(arguments.rows, arguments.minutes)
    every, usual = arms(PrefillConfig()), PrefillConfig.draft_slots
    open_drafts = {"full": (every["full"], usual), "window": (every["window"], usual), "chosen": (every[CHOSEN], usual)}
    open_drafts |= {f"chosen {num_slots}": (every[CHOSEN], num_slots) for num_slots in arguments.slots}
    measure(arguments, rows, open_drafts)
    report = summarise(rows, list(open_drafts))
    print_report({"experiment": "real_slots", **describe(), "gamma": arguments.gamma, **report}, arguments.out)


if __name__ == "__main__":
    run_script(main)
