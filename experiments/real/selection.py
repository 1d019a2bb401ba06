"""Judge what each selection rule keeps of the evidence of the judging prompts (experiments/real/judging).

Rules: the default, a calibration where one is named, BM25 and the paper's. A row is written for every prompt and rule:
whether all evidence is kept at 0.1 and 0.2, and how much of it. A run goes on where it ended. --cache keeps the draft's
KV cache of every prompt on disk (25 MB each at 2K), so that a second run, of a changed rule, runs the scoring queries
alone. Constants are chosen on one half of the documents and judged on the other (--half). Intervals: 95 %, by drawing
documents again. Prints tables, ends in one JSON line. The target's weights are not used.

    python -m experiments.real.fetch_texts TEXTS
    python -m experiments.real.selection --texts TEXTS --target TARGET --draft DRAFT --rows ROWS.jsonl
        [--calibration FILE] [--cache FOLDER] [--half judge] [--minutes 10] [--without-draft]
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import torch

from experiments.common.bootstrap import mean_interval
from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.judging import all_prompts
from experiments.real.judging.prompt import JudgingPrompt, encode
from experiments.real.rows import add_row_arguments
from experiments.real.scoring import Encoded, Looks, Ranked, Scorer, add_pair_arguments, measure_with
from experiments.real.settings import calibrated
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer

RATES = (0.1, 0.2)
HALVES = ("tune", "judge")


def rules(calibration: Path | None) -> dict[str, PrefillConfig]:
    """The rules by name."""
    default = PrefillConfig()
    found = {"calibrated": calibrated(calibration)} if calibration is not None else {}
    return found | {
        "default": default,
        "BM25": replace(default, scorer="bm25"),
        "paper": PrefillConfig.full_look_ahead(),
    }


def rules_of(arguments: argparse.Namespace) -> dict[str, PrefillConfig]:
    """The rules that the arguments ask for."""
    found = rules(arguments.calibration)
    return {"BM25": found["BM25"]} if arguments.without_draft else found


def judge_rule(encoded: Encoded, looks: Looks, rule: PrefillConfig) -> Row:
    """What a rule keeps of a prompt's evidence, by keep rate: its share."""
    ranked = Ranked.by_rule(encoded, looks, rule)
    wanted = {at for start, stop in encoded.spans for at in range(start, stop)}
    return {str(rate): round(len(wanted & ranked.kept(rate)) / len(wanted), 4) for rate in RATES}


class CachedScorer:
    """A scorer whose draft's KV caches are on disk."""

    def __init__(self, scorer: Scorer, folder: Path | None) -> None:
        self._scorer, self._folder = scorer, folder

    def look(self, encoded: Encoded) -> Looks:
        """Run the scoring queries of a prompt, and what of the prompt is not cached."""
        if self._folder is None:
            return self._scorer.look(encoded)
        name = hashlib.sha256(repr(encoded.token_ids).encode()).hexdigest()[:16]
        file = self._folder / f"{name}.pt"
        if file.exists():
            return replace(self._scorer, index=self._scorer.index.filled(torch.load(file))).look(encoded)
        looks = self._scorer.look(encoded)
        # The draft has gone on with the look-ahead.
        cached = self._scorer.index.fork()
        cached.truncate(len(encoded.token_ids))
        torch.save({key: value.clone() for key, value in cached.contents().items()}, file)
        return looks


def run(arguments: argparse.Namespace, prompts: Sequence[JudgingPrompt], rows: Rows) -> None:
    """Judge what is left of the prompts."""
    wanted, tokenizer = rules_of(arguments), load_tokenizer(str(arguments.target))
    scorer = None if arguments.without_draft else CachedScorer(Scorer.load(arguments), arguments.cache)
    for prompt in prompts:
        left = rows.left(prompt.name, wanted)
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, prompt)
        looks = {} if scorer is None else scorer.look(encoded)
        told = {name: getattr(prompt, name) for name in ("family", "shape", "medium", "source", "half")}
        for name, rule in left.items():
            found = judge_rule(encoded, looks, rule)
            rows.add(prompt.name, name, {**told, "num_tokens": len(encoded.token_ids), "share": found})
        shown = "  ".join(f"{name} {[*rows.of_arm(name)[prompt.name]['share'].values()]}" for name in left)
        print(f"{prompt.name:40s} {shown}  {process_time() - began:.0f} CPU s", flush=True)


def table(title: str, rows: Iterable[Row]) -> dict[str, Any]:
    """Print the share of prompts whose evidence is all kept, with its interval, by keep rate; the same as values."""
    own = list(rows)
    sources = [row["source"] for row in own]
    cells = {str(rate): mean_interval([float(row["share"][str(rate)] == 1) for row in own], sources) for rate in RATES}
    shown = "  ".join(f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in cells.values())
    print(f"{title:44s} n={len(own):4d}  {shown}")
    return {"n": len(own), **{rate: [round(each, 3) for each in cell] for rate, cell in cells.items()}}


def summary(rows: Rows, names: Sequence[str], half: str) -> dict[str, Any]:
    """The tables of one half of the documents: all, by family, by shape."""
    report: dict[str, Any] = {}
    for part in ("half", "family", "shape"):
        for name in names:
            own = [row for row in rows.of_arm(name).values() if row["half"] == half]
            for value in dict.fromkeys(row[part] for row in own):
                found = table(f"{value}, {name}", (row for row in own if row[part] == value))
                report.setdefault(value, {})[name] = found
    return report


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """The texts, and which prompts are made of them."""
    parser.add_argument("--texts", type=Path, required=True, help="folder of experiments.real.fetch_texts")
    parser.add_argument("--num-tokens", type=int, default=1900, help="of a document, about (%(default)s)")
    parser.add_argument("--size", type=int, default=1, help="factor of the number of documents (%(default)s)")
    parser.add_argument("--half", choices=HALVES, help="only this half of the documents (default: both)")
    parser.add_argument("--cache", type=Path, help="folder for the draft's KV caches")


def prompts_for(arguments: argparse.Namespace, measure: Callable[[str], int]) -> list[JudgingPrompt]:
    """The prompts that the arguments ask for."""
    found = all_prompts(arguments.texts, arguments.num_tokens, measure, arguments.size)
    return [prompt for prompt in found if arguments.half in (None, prompt.half)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--without-draft", action="store_true", help="BM25 alone, in a minute")
    add_row_arguments(parser)
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    if arguments.cache is not None:
        arguments.cache.mkdir(parents=True, exist_ok=True)
    prompts = prompts_for(arguments, measure_with(load_tokenizer(str(arguments.target))))[: arguments.limit]
    names, rows = list(rules_of(arguments)), Rows(arguments.rows, arguments.minutes)
    keys = [prompt.name for prompt in prompts]
    if rows.has_time and rows.num_left(keys, names):
        run(arguments, prompts, rows)
    left = rows.num_left(keys, names)
    report = {"experiment": "selection", **describe(), "num_tokens": arguments.num_tokens, "num_left": left}
    halves = [arguments.half] if arguments.half else HALVES
    print_report({**report, **{half: summary(rows, names, half) for half in halves}}, arguments.out)


if __name__ == "__main__":
    run_script(main)
