"""What works on which architecture, and how exactly: the table of docs/support.md, and the largest error of each entry.

Every entry is a claim of `spec_stack.hf.architectures`; the figures come from the same measurements that the
tests assert on (`tests/support/matrix.py`), on tiny random models in fp32 with a prompt longer than their windows.
Prints both, ends in one JSON line; --write puts the table into docs/support.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.common import script
from experiments.common.environment import describe
from spec_stack.hf.architectures import abilities
from tests.support import matrix
from tests.support.tiny_architectures import CONFIGS, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
# A configuration that is only there to tell our own error from transformers'.
UNLISTED = ("Nemotron-H, unbounded",)


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| architecture | score prompts | sparse prefill | speculative decode |",
        "|---|---|---|---|",
    ]
    for name, config in CONFIGS.items():
        can = abilities(config)
        if name not in UNLISTED:
            lines.append(f"| {name} | {can.score} | {can.sparse_prefill} | {can.decode} |")
    for name, config in REFUSED.items():
        lines.append(f"| {name} | {abilities(config).score} | refused | refused |")
    return "\n".join(lines)


def replace_table(text: str) -> str:
    """The text with the table between its markers renewed. Raises ValueError where there are none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} in the text")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def measure(name: str, seeds: int) -> dict[str, Any]:
    """The largest error of every column over the seeds, and the counts of greedy decoding."""
    can = abilities(CONFIGS[name])
    scores = can.score.level != "refused"
    draft = name if scores else "Mistral"
    dense = [matrix.decoded(name, seed) for seed in range(seeds)]
    sparse = [matrix.decoded_sparsely(name, draft, seed) for seed in range(seeds)]
    num_prompt = matrix.NUM_PROMPT if scores else CONFIGS[name].sliding_window - 4
    return {
        "score_error": max(matrix.score_error(name, num_prompt, kernel) for kernel in (1, 5)),
        "sparse_prefill_error": max(matrix.sparse_error(name, chunk) for chunk in (4096, 7, 1)),
        "rollback_error": max(matrix.rollback_error(name, seed) for seed in range(seeds)),
        "tokens": sum(run.num_tokens for run in dense + sparse),
        "tokens_different": sum(run.num_tokens - run.num_equal for run in dense + sparse),
        "accepted": sum(run.num_accepted for run in dense + sparse),
        "rejected": sum(run.num_rejected for run in dense + sparse),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="random gamma sequences per architecture (%(default)s)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/support.md and measure nothing")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    print(table())
    print("\nlargest error, in segments of the largest expected value (importance: absolute)")
    print(f"{'architecture':24s}    score  sparse prefill  rollback  tokens different  accepted  rejected")
    rows = {}
    for name in CONFIGS:
        row = rows[name] = measure(name, arguments.seeds)
        print(
            f"{name:24s} {row['score_error']:8.1e} {row['sparse_prefill_error']:15.1e} {row['rollback_error']:9.1e} "
            f"{row['tokens_different']:8d} of {row['tokens']:4d} {row['accepted']:9d} {row['rejected']:9d}",
            flush=True,
        )
    print(json.dumps({"experiment": "support_table", **describe(), "seeds": arguments.seeds, "rows": rows}))


if __name__ == "__main__":
    script.run(main)
