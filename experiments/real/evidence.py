"""Measure what of the evidence each selection rule keeps of a prompt, over one pass of the draft a prompt.

Prompts (evidence_prompts.py): with --shapes documents with several questions, each asked in many shapes of prompts;
with --multi-hop a question set whose evidence stands in several paragraphs. Rules: the default, a calibration where one
is named, BM25, the paper's, and lines in random order; with --draft-free BM25, random lines, the newest ones, and with
--embeddings those like the question, without a pass of the draft. A row is written for every prompt and rule: the share
of the prompt at which all of its evidence is kept, and how much of it is kept at 0.1, 0.2 and 0.3. A run goes on where
it ended. Intervals: 95 %, by drawing documents again. Prints tables, ends in one JSON line. The target's weights are
not used.

    python -m experiments.real.evidence --data DATA --target TARGET --draft DRAFT --rows ROWS.jsonl --shapes
        [--calibration FILE] [--minutes 10]
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any
from zlib import crc32

from experiments.common import script
from experiments.common.bootstrap import mean_interval
from experiments.common.environment import note_pair
from experiments.real.evidence_prompts import EvidencePrompt, multi_hop, shaped_prompts
from experiments.real.line_embeddings import LineEmbeddings
from experiments.real.scoring import (
    Encoded,
    Looks,
    Ranked,
    Scorer,
    add_prompt_arguments,
    add_scorer_arguments,
    calibrated,
    encode,
    measure_with,
)
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer

RATES = (0.1, 0.2, 0.3)
RANDOM, NEWEST, EMBEDDINGS = "random lines", "newest lines", "line embeddings"
_GRID = [at / 200 for at in range(4, 201)]
Tell = Callable[[Row], float]


Rule = Callable[[Any, Encoded, Looks], Ranked]
"""What ranks a prompt's segments: by the prompt, its tokens and what the draft attended to."""


def by_config(config: PrefillConfig) -> Rule:
    return lambda prompt, encoded, looks: Ranked.by_rule(encoded, looks, config)


def by_chance(prompt: Any, encoded: Encoded, looks: Looks) -> Ranked:
    return Ranked.by_chance(encoded, crc32(prompt.name.encode()))


def by_age(prompt: Any, encoded: Encoded, looks: Looks) -> Ranked:
    return Ranked.by_age(encoded)


def rules(calibration: Path | None) -> dict[str, Rule]:
    """The rules that may need a pass of the draft, by name."""
    default = PrefillConfig()
    chosen = {} if calibration is None else {"calibrated": by_config(calibrated(calibration))}
    bm25, paper = by_config(replace(default, scorer="bm25")), by_config(PrefillConfig.full_look_ahead())
    return {"default": by_config(default), **chosen, "BM25": bm25, "paper": paper}


def rules_of(arguments: argparse.Namespace) -> dict[str, Rule]:
    """The rules that the arguments ask for."""
    found = rules(arguments.calibration)
    if arguments.draft_free:
        own: dict[str, Rule] = {"BM25": found["BM25"], RANDOM: by_chance, NEWEST: by_age}
        if arguments.embeddings:
            own[EMBEDDINGS] = LineEmbeddings(load_tokenizer(str(arguments.target)))
        return own
    return {**found, RANDOM: by_chance}


def judged(prompt: EvidencePrompt, encoded: Encoded, ranked: Ranked) -> Row:
    """What a rule keeps of a prompt's evidence."""
    gold, answers = encoded.spans[: len(prompt.spans)], iter(encoded.spans[len(prompt.spans) :])
    hops = [[next(answers) for _ in hop] for hop in prompt.hops]
    kept = {rate: ranked.kept(rate) for rate in RATES}
    return {
        "kind": prompt.kind,
        "shape": prompt.shape,
        "source": prompt.source,
        "needed": _GRID[bisect_left(_GRID, True, hi=len(_GRID) - 1, key=lambda rate: _all(gold, ranked.kept(rate)))],
        "share": shares(gold, kept),
        "any": {str(rate): any(_all([span], own) for span in gold) for rate, own in kept.items()},
        "hops": {str(rate): all(any(_all([span], own) for span in hop) for hop in hops) for rate, own in kept.items()},
        "num_hops": len(hops),
    }


def shares(spans: Iterable[tuple[int, int]], kept: dict[float, set[int]]) -> dict[str, float]:
    """How much of the evidence is kept, by keep rate."""
    wanted = {at for start, stop in spans for at in range(start, stop)}
    return {str(rate): round(len(wanted & own) / len(wanted), 4) for rate, own in kept.items()}


def _all(spans: Sequence[tuple[int, int]], kept: set[int]) -> bool:
    return all(kept.issuperset(range(start, stop)) for start, stop in spans)


def run(
    arguments: argparse.Namespace,
    prompts: Sequence[Any],
    rows: Rows,
    wanted: dict[str, Rule],
    encode: Callable[[Any, Any], Encoded] = encode,
    judge: Callable[[Any, Encoded, Ranked], Row] = judged,
) -> int:
    """Judge what is left of the prompts; how many stay. encode: a tokenizer's tokens of a prompt. judge: a row of it by
    a rule."""
    keys = [prompt.name for prompt in prompts]
    if not (rows.has_time and rows.num_left(keys, wanted)):
        return rows.num_left(keys, wanted)
    tokenizer = load_tokenizer(str(arguments.target))
    scorer = None if arguments.draft_free else Scorer.load(arguments)
    for prompt in prompts:
        left = rows.left(prompt.name, wanted)
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, prompt)
        looks = {} if scorer is None else scorer.look(encoded)
        for name, rule in left.items():
            found = judge(prompt, encoded, rule(prompt, encoded, looks))
            rows.add(prompt.name, name, {"num_tokens": len(encoded.token_ids), **found})
        kept = "  ".join(f"{name} {[*rows.of_arm(name)[prompt.name]['share'].values()]}" for name in left)
        print(f"{prompt.name:40s} {kept}  {process_time() - began:.0f} CPU s", flush=True)
    return rows.num_left(keys, wanted)


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


def summary(rows: Rows, names: Sequence[str], is_multi_hop: bool) -> dict[str, Any]:
    """All tables of a run."""
    every = list(rows.of_arm(names[0]).values())
    print(f"kept at {RATES}, of {len(every)} prompts from {len({row['source'] for row in every})} documents")
    report: dict[str, Any] = {"num_prompts": len(every), "whole": table("all", rows, names, everything, whole)}
    if is_multi_hop:
        report["any"] = table("any gold", rows, names, everything, told("any"))
        report["hops"] = {
            kind: table(f"{kind}, all hops' answers", rows, names, having("kind", kind), told("hops"))
            for kind in dict.fromkeys(row["kind"] for row in every if row["num_hops"])
        }
    else:
        shapes = dict.fromkeys(row["shape"] for row in every)
        report["shape"] = {shape: table(shape, rows, names, having("shape", shape), whole) for shape in shapes}
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    add_scorer_arguments(parser, precision="fp32")
    add_prompt_arguments(parser)
    sets = parser.add_mutually_exclusive_group(required=True)
    sets.add_argument("--shapes", action="store_true", help="several questions a document, in many shapes of prompts")
    sets.add_argument("--multi-hop", type=Path, metavar="FILE", help="a set of multi-hop questions, JSON lines")
    parser.add_argument("--per-shape", type=int, default=2, help="with --shapes, questions a shape of a document")
    parser.add_argument("--draft-free", action="store_true", help="only rules that need no draft")
    parser.add_argument("--embeddings", action="store_true", help="with --draft-free, WordLlama's too")
    script.add_row_arguments(parser, limited=False)
    arguments = parser.parse_args()
    if arguments.embeddings and not arguments.draft_free:
        parser.error("--embeddings needs --draft-free")
    note_pair(str(arguments.target), str(arguments.draft))
    wanted, rows = rules_of(arguments), Rows(arguments.rows, arguments.minutes)
    if arguments.multi_hop:
        prompts = multi_hop(arguments.multi_hop, arguments.limit)
    else:
        measure = measure_with(load_tokenizer(str(arguments.target)))
        settings = (arguments.num_tokens, arguments.documents, measure, arguments.seed, arguments.per_shape)
        prompts = shaped_prompts(arguments.data, *settings)
    left = run(arguments, list(islice(prompts, arguments.limit)), rows, wanted)
    report = {"num_tokens": arguments.num_tokens, "num_left": left}
    report |= summary(rows, list(wanted), bool(arguments.multi_hop))
    script.print_report("evidence", report, arguments.out)


if __name__ == "__main__":
    script.run(main)
