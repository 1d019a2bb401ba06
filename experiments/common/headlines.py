"""The tables that docs/results.md begins with: what was measured of a real pair, written from the committed results.

A row names the script that made it and its result files, which know their commits; a cell holds one figure. To add a
row: a function that makes its figures of the files' contents, and a line in FIRST_TOKENS or ROWS.

    python -m experiments.common.headlines
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common import script
from spec_stack.prefill.calibration import Calibration

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
CALIBRATION = ROOT / "spec_stack" / "assets" / "calibrations" / "qwen2.5-coder-0.5b.json"
Content = Mapping[str, Any]
ByLength = Callable[[Content], Mapping[str, Content]]


Figure = tuple[str, str, int | str]
"""What was measured, the figure, and n."""


@dataclass(frozen=True)
class FirstToken:
    """A setting's time to the first token, dense over its own, and its rows by length in a result."""

    setting: str
    file: str
    rows: ByLength


@dataclass(frozen=True)
class Row:
    """A script in experiments/runs, its files, and the figures of their contents."""

    run: str
    files: tuple[str, ...]
    figures: Callable[..., list[Figure]]


def load(name: str, folder: Path = RESULTS) -> Any:
    """A result, by default a committed one."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def around(values: list[float], form: str = ".2f") -> str:
    """A figure with its range or interval."""
    middle, low, high = (format(value, form) for value in values)
    return middle if low == high else f"{middle} [{low}, {high}]"


def shipped(content: Content, calibration: Path = CALIBRATION) -> dict[str, Content]:
    """The calibration's rows by length, with its window for that length."""
    prefill = Calibration.load(calibration).apply()
    found: dict[str, Content] = {}
    for length, own in content["lengths"].items():
        window = prefill.window_for(int(length))
        name = "calibrated 0.1" + (f", window {window}" if window else "")
        # A run in slices has not come to all lengths.
        found |= {length: own[name]} if name in own else {}
    return found


def setting_of(name: str) -> ByLength:
    """A setting's rows by length."""
    return lambda content: {length: own[name] for length, own in content["lengths"].items()}


def _humaneval(content: Content) -> list[Figure]:
    batched, spec = content["batched"], content["spec"]
    shares = [around([arm["pass_at_1"], *arm["interval"]], ".3f") for arm in (batched, spec)]
    return [
        ("HumanEval, pass@1 (its makers: 0.707): Transformers", shares[0], batched["n"]),
        ("HumanEval: with the draft", shares[1], spec["n"]),
        ("HumanEval: texts that part, at near-ties", str(len(spec["divergences"])), spec["n"]),
    ]


def _conversations(content: Content) -> list[Figure]:
    dense, session = content["summary"]
    what = "Right answers in five turns over 3K, a session at 0.1 less dense"
    return [
        (what, around(session["less_dense"], "+.3f"), session["asked"]),
        ("the same, dense alone", f"{dense['right']:.3f}", dense["asked"]),
    ]


def _agents(cold: Content, warm: Content) -> list[Figure]:
    first, later = cold["kinds"]["cold, whole conversation"], warm["kinds"]["warm turns, nothing pruned"]
    # Sooner by the largest ratio is the least.
    value, low, high = (1 / ratio for ratio in first["ttft_ratio"])
    return [
        (
            "Recorded agents, first token, dense over ours: cold turns at 8K and 11K",
            f"{around([value, high, low])}×",
            first["n"],
        ),
        ("agents: later turns, of which nothing is pruned", f"{around(later['ttft_ratio'])}×", later["n"]),
    ]


FIRST_TOKENS = (
    FirstToken("calibrated, 0.1 (8K: window of 512)", "real_speed", shipped),
    FirstToken("the same without the window", "real_speed", setting_of("calibrated 0.1")),
    FirstToken("not calibrated, 0.2", "real_speed", setting_of("default 0.2")),
    FirstToken("SpecPrefill's rule, 0.2", "real_speed", setting_of("paper 0.2")),
    FirstToken("SmolLM2 135M as the draft, not calibrated, 0.2", "real_speed_smollm2", setting_of("default 0.2")),
)
LENGTHS = ("2048", "4096", "8192")
ROWS = (
    Row("real_humaneval", ("humaneval",), _humaneval),
    Row("session_suite_real", ("session_suite_real",), _conversations),
    Row("real_agents", ("real_agents_cold", "real_agents"), _agents),
)


def commit_of(content: Content) -> str:
    """The commit that a result was made at; one that a rebase took out of the history has another beside it."""
    return str(content.get("recorded_at") or content["commit"])


def first_tokens() -> list[str]:
    """The table of first tokens, by prompt length."""
    lines = ["| first token, dense over | 2K | 4K | 8K | n |", "|---|---|---|---|---|"]
    for row in FIRST_TOKENS:
        found = row.rows(load(row.file))
        cells = [f"{around(found[length]['ttft_ratio'])}×" if length in found else "–" for length in LENGTHS]
        (number,) = {own["n"] for own in found.values()}
        lines.append(f"| {' | '.join([row.setting, *cells, str(number)])} |")
    return lines


def table() -> str:
    """Return both tables in Markdown."""
    lines = [*first_tokens(), "", "| what | figure | n | made by |", "|---|---|---|---|"]
    for row in ROWS:
        contents = [load(name) for name in row.files]
        made_at = ", ".join(f"`{commit}`" for commit in dict.fromkeys(map(commit_of, contents)))
        made_by = f"`{row.run}.sh`, {made_at}"
        for at, (what, figure, number) in enumerate(row.figures(*contents)):
            lines.append(f"| {what} | {figure} | {number} | {'' if at else made_by} |")
    return "\n".join(lines)


def with_table(page: str, rows: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with a table between its marks. Raises ValueError where it has none."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold {begin} and {end} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{rows}\n{end}{rest.split(end)[1]}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    script.run(main)
