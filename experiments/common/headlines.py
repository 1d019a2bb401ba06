"""The rows that docs/results.md begins with: what was measured of a real pair, written from the committed results.

A row names the script that made it and its result files, which know their commits. To add a row: a function that makes
the figure of the files' contents, and a line in ROWS.

    python -m experiments.common.headlines
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.script import run_script
from spec_stack.prefill.calibration import Calibration

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
CALIBRATION = ROOT / "spec_stack" / "assets" / "calibrations" / "qwen2.5-coder-0.5b.json"
Content = Mapping[str, Any]
ByLength = Callable[[Content], Mapping[str, Content]]


@dataclass(frozen=True)
class Row:
    """What was measured, its script in experiments/runs, its files, and what makes figure and n of them."""

    what: str
    run: str
    files: tuple[str, ...]
    figure: Callable[..., str]
    n: Callable[..., str]


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
    found = {}
    for length, own in content["lengths"].items():
        window = prefill.window_for(int(length))
        found[length] = own["calibrated 0.1" + (f", window {window}" if window else "")]
    return found


def by_default(content: Content) -> dict[str, Content]:
    """The default's rows by length."""
    return {length: own["default 0.2"] for length, own in content["lengths"].items()}


def _times_sooner(rows: ByLength) -> Callable[[Content], str]:
    return lambda content: ", ".join(
        f"{int(length) // 1024}K {around(row['ttft_ratio'])}×" for length, row in rows(content).items()
    )


def _repeats(rows: ByLength) -> Callable[[Content], str]:
    return lambda content: ", ".join(str(row["n"]) for row in rows(content).values())


def _decoding(content: Content) -> str:
    arms = {name: arm["speed_over_plain"] for name, arm in content["all"].items()}
    assisted = max(arm[0] for name, arm in arms.items() if name.startswith("assisted"))
    return (
        f"{around(arms['default'])}; {around(arms['draft'])}; Transformers {around(arms['look-up 10'])}, {assisted:.2f}"
    )


def _longbench(content: Content) -> str:
    names = ("default 0.2", "calibrated 0.2", "calibrated 0.1", "BM25 0.2", "random 0.2", "dense, other rounding")
    return "; ".join(around(content["arms"][name]["share_of_dense"]) for name in names)


def _humaneval(content: Content) -> str:
    shares = [around([content[arm]["pass_at_1"], *content[arm]["interval"]], ".3f") for arm in ("batched", "spec")]
    gaps = [abs(gap) for *_, gap in content["spec"]["divergences"].values()]
    return f"{'; '.join(shares)}; {len(gaps)} part, by {max(gaps, default=0.0):.3g} of a logit at most"


def _conversations(content: Content) -> str:
    dense, session = content["summary"]
    return f"{session['right']:.3f}; {dense['right']:.3f}; difference {around(session['less_dense'], '+.3f')}"


def _agents(cold: Content, warm: Content) -> str:
    first = cold["kinds"]["cold, whole conversation"]["ttft_ratio"]
    later = warm["kinds"]["warm turns, nothing pruned"]["ttft_ratio"]
    # Sooner by the largest ratio is the least.
    sooner = [1 / first[0], 1 / first[2], 1 / first[1]]
    return f"{around(sooner)}× sooner; {around(later)} of a kept dense cache"


ROWS = (
    Row(
        "Time to first token, dense over calibrated at 0.1, 0.5B draft",
        "real_speed",
        ("real_speed",),
        _times_sooner(shipped),
        _repeats(shipped),
    ),
    Row(
        "the same, default at 0.2, SmolLM2 135M as the draft",
        "real_speed",
        ("real_speed_smollm2",),
        _times_sooner(by_default),
        _repeats(by_default),
    ),
    Row(
        "LongBench's scores to 4K over dense: default 0.2, calibrated 0.2 and 0.1, BM25, random, another rounding",
        "real_quality",
        ("longbench",),
        _longbench,
        lambda content: f"{content['arms']['dense']['n']}; rounding {content['arms']['dense, other rounding']['n']}",
    ),
    Row(
        "HumanEval, pass@1 (its makers: 0.707): Transformers alone; with the draft; texts that part",
        "real_humaneval",
        ("humaneval",),
        _humaneval,
        lambda content: f"{content['batched']['n']}, {content['spec']['n']}",
    ),
    Row(
        "Decoding over plain: default; draft alone; Transformers' look-up, its best assisted",
        "real_decode",
        ("real_decode",),
        _decoding,
        lambda content: str(content["num_prompts"]),
    ),
    Row(
        "Right answers in conversations of five turns over 3K: session, 0.1 kept; dense",
        "session_suite_real",
        ("session_suite_real",),
        _conversations,
        lambda content: str(content["summary"][0]["asked"]),
    ),
    Row(
        "Recorded agents: cold turns at 8K and 11K; later turns of which nothing is pruned",
        "real_agents",
        ("real_agents_cold", "real_agents"),
        _agents,
        lambda cold, warm: (
            f"{cold['kinds']['cold, whole conversation']['n']}, {warm['kinds']['warm turns, nothing pruned']['n']}"
        ),
    ),
)


def commit_of(content: Content) -> str:
    """The commit that a result was made at; one that a rebase took out of the history has another beside it."""
    return str(content.get("recorded_at") or content["commit"])


def table() -> str:
    """Return the rows in Markdown."""
    lines = ["| what | figure | n | made by |", "|---|---|---|---|"]
    for row in ROWS:
        contents = [load(name) for name in row.files]
        made_at = ", ".join(f"`{commit}`" for commit in dict.fromkeys(map(commit_of, contents)))
        made_by = f"`experiments/runs/{row.run}.sh`, {made_at}"
        lines.append(f"| {row.what} | {row.figure(*contents)} | {row.n(*contents)} | {made_by} |")
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
    run_script(main)
