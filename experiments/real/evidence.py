"""Measure what of the evidence each selection rule keeps of a prompt, over one pass of the draft a prompt.

Prompts: one question behind each document, by kind; with --shapes documents with several questions, each asked in many
shapes of prompts; with --multi-hop question sets whose evidence stands in several paragraphs (all:
evidence_prompts.py). Rules: the default, a calibration where one is named, BM25, the paper's, and lines in random
order; with --draft-free BM25, random lines and the newest ones, without a pass of the draft. A row is written for every
prompt and rule: the share of the prompt at which all of its evidence is kept, and how much of it is kept at 0.1, 0.2
and 0.3. A run goes on where it ended. Intervals: 95 %, by drawing documents again. Prints tables, ends in one JSON
line. The target's weights are not used.

    python -m experiments.real.evidence --data DATA --target TARGET --draft DRAFT --rows ROWS.jsonl --shapes
        [--calibration FILE] [--minutes 10]
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any
from zlib import crc32

from experiments.common.bootstrap import mean_interval
from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.evidence_prompts import (
    OTHER_WORDS,
    EvidencePrompt,
    make_prompts,
    multi_hop,
    shaped_prompts,
)
from experiments.real.rows import add_row_arguments
from experiments.real.scoring import (
    Encoded,
    Looks,
    Ranked,
    Scorer,
    add_pair_arguments,
    add_prompt_arguments,
    encode,
    measure_with,
)
from experiments.real.settings import calibrated
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer

RATES = (0.1, 0.2, 0.3)
RANDOM, NEWEST = "random lines", "newest lines"
_GRID = [at / 200 for at in range(4, 201)]
Tell = Callable[[Row], float]


Rule = Callable[[EvidencePrompt, Encoded, Looks], Ranked]


def by_config(config: PrefillConfig) -> Rule:
    return lambda prompt, encoded, looks: Ranked.by_rule(encoded, looks, config)


def rules(calibration: Path | None, draft_free: bool = False) -> dict[str, Rule]:
    """The rules by name."""
    default = PrefillConfig()
    found = {"BM25": by_config(replace(default, scorer="bm25"))}
    if not draft_free:
        chosen = {} if calibration is None else {"calibrated": by_config(calibrated(calibration))}
        found = {"default": by_config(default), **chosen, **found, "paper": by_config(PrefillConfig.full_look_ahead())}
    found[RANDOM] = lambda prompt, encoded, looks: Ranked.by_chance(encoded, crc32(prompt.name.encode()))
    if draft_free:
        found[NEWEST] = lambda prompt, encoded, looks: Ranked.by_age(encoded)
    return found


def judge_rule(prompt: EvidencePrompt, encoded: Encoded, looks: Looks, rule: Rule) -> Row:
    """What a rule keeps of a prompt's evidence."""
    ranked = rule(prompt, encoded, looks)
    gold, answers = encoded.spans[: len(prompt.spans)], iter(encoded.spans[len(prompt.spans) :])
    hops = [[next(answers) for _ in hop] for hop in prompt.hops]
    kept = {rate: ranked.kept(rate) for rate in RATES}
    return {
        "needed": _GRID[bisect_left(_GRID, True, hi=len(_GRID) - 1, key=lambda rate: _all(gold, ranked.kept(rate)))],
        "share": {str(rate): _share(gold, own) for rate, own in kept.items()},
        "any": {str(rate): any(_all([span], own) for span in gold) for rate, own in kept.items()},
        "hops": {str(rate): all(any(_all([span], own) for span in hop) for hop in hops) for rate, own in kept.items()},
        "num_hops": len(hops),
    }


def _all(spans: Sequence[tuple[int, int]], kept: set[int]) -> bool:
    return all(kept.issuperset(range(start, stop)) for start, stop in spans)


def _share(spans: Sequence[tuple[int, int]], kept: set[int]) -> float:
    wanted = {at for start, stop in spans for at in range(start, stop)}
    return round(len(wanted & kept) / len(wanted), 4)


def prompts_for(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[EvidencePrompt]:
    """The prompts that the arguments ask for, always the same and in the same order."""
    data, num_tokens, seed, measure = arguments.data, arguments.num_tokens, arguments.seed, measure_with(tokenizer)
    if arguments.shapes:
        return shaped_prompts(data, num_tokens, arguments.documents, measure, seed, arguments.per_shape)
    if arguments.multi_hop:
        return multi_hop(arguments.multi_hop, arguments.limit)
    return make_prompts(data, num_tokens, arguments.per_kind, measure, seed)


def run(arguments: argparse.Namespace, prompts: Sequence[EvidencePrompt], rows: Rows) -> None:
    """Judge what is left of the prompts."""
    wanted = rules(arguments.calibration, arguments.draft_free)
    tokenizer = load_tokenizer(str(arguments.target))
    scorer = None if arguments.draft_free else Scorer.load(arguments)
    for prompt in prompts:
        left = rows.left(prompt.name, wanted)
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, prompt)
        looks = {} if scorer is None else scorer.look(encoded)
        told = {"kind": prompt.kind, "shape": prompt.shape, "source": prompt.source}
        for name, rule in left.items():
            found = judge_rule(prompt, encoded, looks, rule)
            rows.add(prompt.name, name, {**told, "num_tokens": len(encoded.token_ids), **found})
        needs = "  ".join(f"{name} {rows.of_arm(name)[prompt.name]['needed']:.2f}" for name in left)
        print(f"{prompt.name:40s}{needs}  {process_time() - began:.0f} CPU s", flush=True)


def whole(rate: float) -> Tell:
    return lambda row: float(row["share"][str(rate)] == 1)


def told(what: str) -> Callable[[float], Tell]:
    """Read a value that a row holds by rate."""
    return lambda rate: lambda row: float(row[what][str(rate)])


def having(part: str, value: str) -> Callable[[Row], bool]:
    return lambda row: bool(row[part] == value)


def everything(row: Row) -> bool:
    return True


def table(
    title: str, rows: Rows, names: Sequence[str], keep: Callable[[Row], bool], tell: Callable[[float], Tell]
) -> dict[str, Any]:
    """Print a mean with its interval by rule and rate, over the rows that are meant; the same as plain values."""
    report: dict[str, Any] = {}
    for name in names:
        own = [row for row in rows.of_arm(name).values() if keep(row)]
        if own:
            sources = [row["source"] for row in own]
            cells = {str(rate): mean_interval([tell(rate)(row) for row in own], sources) for rate in RATES}
            report[name] = {rate: [round(each, 3) for each in cell] for rate, cell in cells.items()}
            shown = "  ".join(f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in cells.values())
            print(f"{title:24s}{name:14s} n={len(own):4d}  {shown}")
    return report


def summary(rows: Rows, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """All tables of a run."""
    every = list(rows.of_arm(names[0]).values())
    print(f"kept at {RATES}, of {len(every)} prompts from {len({row['source'] for row in every})} documents")
    report: dict[str, Any] = {"num_prompts": len(every), "whole": table("all", rows, names, everything, whole)}
    for part in ("shape", "kind"):
        values = list(dict.fromkeys(row[part] for row in every))
        if len(values) > 1:
            report[part] = {value: table(value, rows, names, having(part, value), whole) for value in values}
    if arguments.multi_hop:
        report["any"] = table("any gold", rows, names, everything, told("any"))
        report["hops"] = {
            kind: table(f"{kind}, all hops' answers", rows, names, having("kind", kind), told("hops"))
            for kind in dict.fromkeys(row["kind"] for row in every if row["num_hops"])
        }
    else:
        report["other_words"] = table("other words", rows, names, lambda row: row["kind"] in OTHER_WORDS, whole)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser, precision="fp32")
    add_prompt_arguments(parser)
    parser.add_argument("--per-kind", type=int, default=9, help="prompts of each kind (%(default)s)")
    parser.add_argument("--shapes", action="store_true", help="several questions a document, in many shapes of prompts")
    parser.add_argument("--per-shape", type=int, default=2, help="with --shapes, questions a shape of a document")
    parser.add_argument("--multi-hop", type=Path, metavar="FILE", help="a set of multi-hop questions, JSON lines")
    parser.add_argument("--draft-free", action="store_true", help="only rules that need no draft")
    add_row_arguments(parser, limited=False)
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    names, rows = list(rules(arguments.calibration, arguments.draft_free)), Rows(arguments.rows, arguments.minutes)
    prompts = list(islice(prompts_for(arguments, load_tokenizer(str(arguments.target))), arguments.limit))
    keys = [prompt.name for prompt in prompts]
    if rows.num_left(keys, names):
        run(arguments, prompts, rows)
    left = rows.num_left(keys, names)
    report = {"experiment": "evidence", **describe(), "num_tokens": arguments.num_tokens, "num_left": left}
    print_report({**report, **summary(rows, names, arguments)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
