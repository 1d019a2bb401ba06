"""The README's table, written from results: one figure a cell, by prompt length.

A row names the script that makes it and the results that it reads, which are the committed ones, or those of a run of
`experiments.figures`. To write the README's table anew:

    python -m experiments.common.front_page
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common import script
from experiments.common.headlines import CALIBRATION, RESULTS, ROOT, around, load, shipped, with_table

Content = Mapping[str, Any]
Found = tuple[str, int]
"""A cell, and how many prompts or repeats it is of."""
LENGTHS = ("2k", "4k", "8k")
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Row:
    """What was measured, its script in experiments/runs, the result for each length, and what makes a cell of it."""

    what: str
    run: str
    files: tuple[str, ...]
    cell: Callable[[Content, str, Path], Found | None]

    def found(self, folder: Path, calibration: Path) -> list[Found | None]:
        """The cells; None where nothing was measured."""
        return [
            self.cell(load(file, folder), length, calibration) if (folder / f"{file}.json").is_file() else None
            for file, length in zip(self.files, LENGTHS, strict=False)
        ]


def _tokens(length: str) -> str:
    return str(int(length.removesuffix("k")) * 1024)


def _first_token(content: Content, length: str, calibration: Path) -> Found | None:
    own = shipped(content, calibration).get(_tokens(length))
    return None if own is None else (f"**{around(own['ttft_ratio'])}×**", own["n"])


def _whole_answer(content: Content, length: str, calibration: Path) -> Found | None:
    own = content["cells"].get(f"{_tokens(length)}/64")
    return None if own is None else (f"{around(own['pruned']['over_theirs'])}×", own["n"])


def _evidence(rule: str) -> Callable[[Content, str, Path], Found | None]:
    def cell(content: Content, length: str, calibration: Path) -> Found | None:
        own = content["whole"].get(rule)
        return None if own is None else (around(own["0.1"]), content["num_prompts"])

    return cell


def _answers(arm: str) -> Callable[[Content, str, Path], Found | None]:
    def cell(content: Content, length: str, calibration: Path) -> Found | None:
        own = content["shapes"]["all"]["over_dense"][arm]
        return (around(own["right_over"], "+.2f"), own["n"]) if own else None

    return cell


def _decoding(content: Content, length: str, calibration: Path) -> Found | None:
    own = content.get("all", {}).get("default")
    return None if own is None else (f"**{around(own['speed_over_plain'])}×**", content["num_prompts"])


EVIDENCE = tuple(f"evidence_shapes_qwen_{length}" for length in LENGTHS)
ANSWERS = tuple(f"answers_{length}" for length in LENGTHS)
ROWS = (
    Row("time to first token, dense over ours", "real_speed", ("real_speed",) * 3, _first_token),
    Row("64 tokens about code, Transformers over ours", "real_end_to_end", ("real_end_to_end",) * 3, _whole_answer),
    Row("prompts with all evidence kept", "evidence", EVIDENCE, _evidence("calibrated")),
    Row("the same, BM25 in place of the draft", "evidence", EVIDENCE, _evidence("BM25")),
    Row("the same, SpecPrefill's rule", "evidence", EVIDENCE, _evidence("paper")),
    Row("share of right answers, ours less dense", "real_answers", ANSWERS, _answers("calibrated 0.1")),
    Row("decoding, plain over ours, short prompts", "real_decode", ("real_decode",), _decoding),
)


def cells_of(row: Row, folder: Path, calibration: Path) -> tuple[list[str], str]:
    """A row's cells, and the prompts or repeats that each is of."""
    found = row.found(folder, calibration)
    cells = ["–" if each is None else each[0] for each in found] + [""] * (len(LENGTHS) - len(found))
    return cells, "/".join("–" if each is None else str(each[1]) for each in found)


def table(folder: Path = RESULTS, calibration: Path = CALIBRATION) -> str:
    """Return the rows that have results, in Markdown."""
    heads = [length.upper() for length in LENGTHS]
    lines = [f"| calibrated, 10 % kept | {' | '.join(heads)} | n |", "|---|" + "---|" * (len(heads) + 1)]
    for row in ROWS:
        cells, number = cells_of(row, folder, calibration)
        if {*cells} - {"", "–"}:
            lines.append(f"| {' | '.join([row.what, *cells, number])} |")
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(text, table(), BEGIN, END), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    script.run(main)
