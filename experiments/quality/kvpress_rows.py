"""Answer a data set in kvpress's row format, and write its predictions as kvpress's scorers take them.

A row has context, question, answer_prefix, answer and max_new_tokens; files are .jsonl or .parquet, as
`datasets.Dataset.to_json` and `.to_parquet` write them. All answers are query-aware in kvpress's sense: the question is
there when the context is pruned. Writes PREFIX_dense.jsonl and PREFIX_RATE.jsonl, prints how many answers contain what
was expected, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.peer_rows import kvpress_prompt, kvpress_row
from experiments.common.script import run_script
from spec_stack import SpecStackGenerator


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .parquet file. Raises ValueError for another suffix, and for no rows."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    else:
        raise ValueError(f"{path}: give a .jsonl or a .parquet file")
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def answer_all(
    generator: SpecStackGenerator, rows: list[dict[str, Any]], keep_rate: float
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each row with its prediction, and whether that contains an expected answer."""
    for row in tqdm(rows, leave=False, desc=f"keep {keep_rate}"):
        result = generator.generate(
            kvpress_prompt(row),
            max_tokens=int(row["max_new_tokens"]),
            keep_rate=keep_rate,
            specprefill=keep_rate < 1,
        )
        expected = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        # What was really kept: the ends and whole chunks make it differ from what was asked for.
        predicted = kvpress_row(row, result.text, result.metrics.keep_rate)
        yield predicted, any(str(each) in result.text for each in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("rows", type=Path, help="the data set")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[1.0, 0.1, 0.2, 0.3], help="(%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many rows")
    parser.add_argument("--prefix", required=True, help="of the files written")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)[: arguments.limit]
    generator = load_generator(arguments)
    right = {}
    for keep_rate in arguments.keep_rates:
        name = "dense" if keep_rate == 1 else f"{keep_rate}"
        predicted = list(answer_all(generator, rows, keep_rate))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row, _ in predicted)
        Path(f"{arguments.prefix}_{name}.jsonl").write_text(lines, encoding="utf-8")
        right[name] = sum(is_right for _, is_right in predicted)
        print(f"{name:8s}{right[name]:5d} of {len(rows)} contain what was expected")
    print(json.dumps({"experiment": "kvpress_rows", **describe(), "rows": len(rows), "right": right}))


if __name__ == "__main__":
    run_script(main)
