"""Judge what each selection rule keeps of the evidence of the judging prompts (experiments/real/judging).

Rules, rows and tables are those of evidence.py. Constants are chosen on one half of the documents and judged on the
other (--half). Ends in one JSON line. The target's weights are not used.

    python -m experiments.real.fetch_texts TEXTS
    python -m experiments.real.selection --texts TEXTS --target TARGET --draft DRAFT --rows ROWS.jsonl
        [--calibration FILE] [--half judge] [--minutes 10] [--without-draft]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common import script
from experiments.common.environment import note_pair
from experiments.real import evidence
from experiments.real.judging import all_prompts
from experiments.real.judging.prompt import JudgingPrompt, encode
from experiments.real.scoring import Encoded, Ranked, add_scorer_arguments, measure_with
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer

HALVES = ("tune", "judge")


def judged(prompt: JudgingPrompt, encoded: Encoded, ranked: Ranked) -> Row:
    """What a rule keeps of a prompt's evidence."""
    told = {name: getattr(prompt, name) for name in ("family", "shape", "medium", "source", "half")}
    return {**told, "share": evidence.shares(encoded.spans, {rate: ranked.kept(rate) for rate in evidence.RATES})}


def of(half: str, part: str, value: str) -> Callable[[Row], bool]:
    return lambda row: row["half"] == half and bool(row[part] == value)


def summary(rows: Rows, names: Sequence[str], half: str) -> dict[str, Any]:
    """The tables of one half of the documents: all, by family, by shape."""
    own = [row for row in rows.of_arm(names[0]).values() if row["half"] == half]
    parts = [(part, value) for part in ("half", "family", "shape") for value in dict.fromkeys(row[part] for row in own)]
    return {value: evidence.table(value, rows, names, of(half, part, value), evidence.whole) for part, value in parts}


def main() -> None:
    parser = script.make_parser(__doc__)
    add_scorer_arguments(parser)
    parser.add_argument("--texts", type=Path, required=True, help="folder of experiments.real.fetch_texts")
    parser.add_argument("--num-tokens", type=int, default=1900, help="of a document, about (%(default)s)")
    parser.add_argument("--half", choices=HALVES, help="only this half of the documents (default: both)")
    parser.add_argument("--without-draft", dest="draft_free", action="store_true", help="BM25 alone, in a minute")
    script.add_row_arguments(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    measure, rows = measure_with(load_tokenizer(str(arguments.target))), Rows(arguments.rows, arguments.minutes)
    every = all_prompts(arguments.texts, arguments.num_tokens, measure)
    prompts = [prompt for prompt in every if arguments.half in (None, prompt.half)][: arguments.limit]
    wanted = evidence.rules(arguments.calibration)
    if arguments.draft_free:
        wanted = {"BM25": wanted["BM25"]}
    left = evidence.run(arguments, prompts, rows, wanted, encode, judged)
    halves = [arguments.half] if arguments.half else HALVES
    report = {"num_tokens": arguments.num_tokens, "num_left": left}
    script.print_report(
        "selection", {**report, **{half: summary(rows, list(wanted), half) for half in halves}}, arguments.out
    )


if __name__ == "__main__":
    script.run(main)
