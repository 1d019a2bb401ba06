"""How good is a draft/target pair? Held-out quality, acceptance, long-context retrieval and cost, pairs side by side.

    python -m experiments.pair.evaluate --valid valid_mixed.jsonl.xz --pair old=OLD --pair new=NEW

Each folder has target/ and draft/ (Transformers folders); without --pair the embedded pair is measured. --parts leaves
out what is not wanted; --earlier shows measurements made before beside the new ones. Prints one table per part and ends
in one JSON line. Retrieval hides a fact in the source of a standard-library module of this Python: its prompts depend
on the Python version.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.pair import metrics as metrics
from experiments.pair.answers import answers
from experiments.pair.data import read_records
from spec_stack import SpecStackGenerator

PARTS = ("quality", "acceptance", "retrieval", "answers", "cost")
OF_RECORDS = ("quality", "acceptance", "answers")
Row = tuple[str, dict[str, float]]


def measure(generator: SpecStackGenerator, args: argparse.Namespace) -> dict[str, Any]:
    records = list(read_records(args.valid)) if args.valid else []
    result: dict[str, Any] = {"measured": describe()}
    for part in args.parts:
        started = time.perf_counter()
        if part == "quality":
            result[part] = metrics.quality(generator, records, args.window, args.share)
        elif part == "acceptance":
            result[part] = metrics.acceptance(generator, records, args.prompts, args.tokens, args.gammas)
        elif part == "retrieval":
            result[part] = metrics.retrieval(generator, args.lengths, args.keep_rates, args.trials)
        elif part == "answers":
            documents = [(record["domain"], metrics.record_text(generator.tokenizer, record)[0]) for record in records]
            result[part] = answers(
                generator,
                documents,
                halves=args.halves,
                lengths=dict(args.answer_lengths),
                keep_rates=args.keep_rates,
                kinds=args.kinds,
            )
        else:
            result[part] = metrics.cost_ratio(generator)
        print(f"  {part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return result


def rows_of(part: str, values: dict[str, Any]) -> list[Row]:
    """The rows of one part's table: a label and named numbers."""
    if part == "cost":
        return [("cost", values)]
    if part == "retrieval":
        lengths = [(f"{length} tokens", row) for length, row in values["by_length"].items()]
        return lengths + [(f"depth {depth}", row) for depth, row in values["by_depth"].items()]
    return [(name, row) for name, row in values.items()]


def _number(value: float | Sequence[float]) -> str:
    if isinstance(value, Sequence):
        share, low, high = value
        return f"{share:.2f} ({low:.2f}-{high:.2f})"
    return f"{value:.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3f}"


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Markdown tables, one per part; the pairs stand side by side in each cell, in the order given."""
    names = list(results)
    out = [f"Each cell: {' / '.join(names)}." if len(names) > 1 else f"Pair: {names[0]}."]
    for part in (part for part in PARTS if any(part in result for result in results.values())):
        rows = {name: dict(rows_of(part, result[part])) if part in result else {} for name, result in results.items()}
        labels = list(dict.fromkeys(label for table in rows.values() for label in table))
        columns = list(dict.fromkeys(column for table in rows.values() for row in table.values() for column in row))
        out += ["", f"**{part}**", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for label in labels:
            cells = [
                " / ".join(_number(rows[name][label][c]) if c in rows[name].get(label, {}) else "-" for name in names)
                for c in columns
            ]
            out.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def read_earlier(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The last line of each file, as this program prints it; parts of the same pair are put together."""
    results: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, parts in json.loads(file.read_text(encoding="utf-8").strip().split("\n")[-1]).items():
            results.setdefault(name, {}).update(parts)
    return results


def write_card(card: Path, section: str) -> None:
    """Put the tables between the card's markers, or at its end when it has none."""
    begin, end = "<!-- measured: begin -->", "<!-- measured: end -->"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    block = f"{begin}\n{section}\n{end}"
    if begin in text and end in text:
        head, rest = text.split(begin, 1)
        text = head + block + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{block}\n".lstrip()
    card.write_text(text, encoding="utf-8")


def parse_pair(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    path = Path(folder)
    for part in ("target", "draft"):
        if not (path / part / "config.json").exists():
            raise argparse.ArgumentTypeError(f"{text!r}: NAME=FOLDER, and FOLDER/{part}/config.json must exist")
    return name, path


def parse_length(text: str) -> tuple[int, int]:
    try:
        length, num = (int(part) for part in text.split("="))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: LENGTH=PROMPTS, as 2000=6") from error
    return length, num


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--pair", action="append", type=parse_pair, default=[], help="NAME=FOLDER; repeatable")
    top.add_argument("--valid", type=Path, help="held-out records (valid_mixed.jsonl.xz); for quality and acceptance")
    top.add_argument("--parts", nargs="+", choices=PARTS, default=None, help="default: all that the inputs allow")
    top.add_argument("--share", type=float, default=0.06, help="share of the held-out windows to score")
    top.add_argument("--window", type=int, default=1024)
    top.add_argument("--prompts", type=int, default=8, help="prompts per category for acceptance")
    top.add_argument("--tokens", type=int, default=64, help="new tokens per prompt for acceptance")
    top.add_argument("--gammas", type=int, nargs="+", default=[4, 8])
    top.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000])
    top.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    top.add_argument("--trials", type=int, default=8, help="prompts per length")
    top.add_argument("--halves", nargs="+", choices=("train", "test"), default=["test"], help="wording of the answers")
    top.add_argument("--kinds", nargs="+", default=None, help="tasks of the answers; default: all")
    top.add_argument(
        "--answer-lengths",
        nargs="+",
        type=parse_length,
        default=[(2000, 6), (4000, 4), (8000, 2)],
        help="LENGTH=PROMPTS per task",
    )
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--earlier", type=Path, nargs="+", default=[], help="outputs of earlier runs, shown as well")
    top.add_argument("--card", type=Path, help="model card to write the tables into")
    return top


def main() -> None:
    args = parser().parse_args()
    if args.parts is None:
        args.parts = [part for part in PARTS if args.valid or part not in OF_RECORDS]
    if not args.valid and set(OF_RECORDS) & set(args.parts):
        raise ValueError(f"{', '.join(OF_RECORDS)} need --valid FILE, the held-out records")
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    results = read_earlier(args.earlier)
    for name, folder in args.pair or ([] if args.earlier else [("embedded", None)]):
        print(f"{name}:", file=sys.stderr, flush=True)
        target, draft = (folder / "target", folder / "draft") if folder else (None, None)
        generator = SpecStackGenerator.from_pretrained(target, draft, precision="fp32", device="cpu")
        results.setdefault(name, {}).update(measure(generator, args))
    section = tables(results)
    print(section)
    if args.card:
        write_card(args.card, section)
    print(json.dumps(results))


if __name__ == "__main__":
    run_script(main)
