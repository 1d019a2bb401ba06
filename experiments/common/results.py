"""Put the rows of headlines.py into docs/results.md, each with the commits that its files were made at.

python -m experiments.common.results
"""

from __future__ import annotations

from pathlib import Path

from experiments.common import headlines
from experiments.common.script import run_script

ROOT = Path(__file__).parents[2]
RUNS, PAGE = ROOT / "experiments" / "runs", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def with_table(page: str, rows: str) -> str:
    """A page with a table between its marks. Raises ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN} and {END} once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), headlines.table()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    run_script(main)
