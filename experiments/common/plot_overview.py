"""The picture of README.md and of the documentation's first page, from the committed results.

python -m experiments.common.plot_overview
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.script import run_script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
_OTHERS, _OURS, _SMALL = "#9aa5a3", "#00796b", "#555555"


@dataclass(frozen=True)
class Chart:
    """One panel. bars: label to the lowest and the highest figure measured, in the order they are drawn; the last is
    this package's. digits: after the point."""

    title: str
    unit: str
    note: str
    bars: Mapping[str, tuple[float, float]]
    digits: int


def _read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def charts() -> list[Chart]:
    """The three figures that matter most, as `experiments/results` has them."""
    prefill = next(length for length in _read("prefill_grid")["lengths"] if 8000 <= length["prompt_tokens"] < 9000)
    speed = _read("bench_policies")["result"]["all"]["tokens_per_s"]
    serving = _read("bench_serving")["results"]["single"]
    rates = {mode: entry["highest_rates"] for mode, entry in serving.items()}
    sparse = {name: entry["ttft_s"] for name, entry in prefill["settings"].items()}
    ttft = {
        "dense": prefill["dense_s"],
        "sparse, keep_rate\u00a00.2": sparse["default, keep 0.2"],
        "calibrated": sparse["calibrated"],
    }
    tokens = {
        "transformers": speed["transformers, plain"],
        "transformers, assisted": speed["transformers, assisted (dynamic)"],
        "spec_stack": speed["throughput"],
    }
    names = {"off": "no speculation", "STANDALONE": "STANDALONE", "SPEC_STACK": "SPEC_STACK"}
    return [
        Chart(
            "Time to first token",
            "seconds, lower is better",
            f"{prefill['prompt_tokens']:,}-token prompt",
            {name: (value, value) for name, value in ttft.items()},
            2,
        ),
        Chart(
            "Decoding",
            "tokens/s, higher is better",
            "48 prompts, the same tokens in all",
            {name: (value, value) for name, value in tokens.items()},
            0,
        ),
        Chart(
            "Serving (SGLang)",
            "requests/s that 99 % get an answer to in 5 s",
            "2,000 to 4,000-token documents",
            {name: (min(rates[mode]), max(rates[mode])) for mode, name in names.items()},
            1,
        ),
    ]


def data(panels: Sequence[Chart]) -> str:
    """The bars as JSON. The picture carries it, so that a test can tell whether it shows the results of today."""
    return json.dumps({panel.title: panel.bars for panel in panels}, ensure_ascii=True)


def draw(to: Path) -> None:
    """Write the picture, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11})
    panels = charts()
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.7), layout="constrained")
    for axis, chart in zip(axes, panels, strict=True):
        lowest, highest = zip(*chart.bars.values(), strict=True)
        places = range(len(chart.bars))
        colours = [_OTHERS] * (len(chart.bars) - 1) + [_OURS]
        axis.bar(places, lowest, color=colours, width=0.62)
        # What only some of the rounds reached.
        axis.bar(places, highest, color=colours, width=0.62, alpha=0.45)
        for place, (low, high) in zip(places, chart.bars.values(), strict=True):
            text = f"{high:.{chart.digits}f}" if low == high else f"{low:.{chart.digits}f} to {high:.{chart.digits}f}"
            axis.text(place, high, text, ha="center", va="bottom", fontweight="bold")
        axis.set_xticks(places, [name.replace(" ", "\n", 1) for name in chart.bars])
        axis.set_ylim(0, max(highest) * 1.15)
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="x", length=0)
        axis.set_title(f"{chart.title}\n\n", loc="left", fontweight="bold", fontsize=13)
        axis.text(0, 1.03, f"{chart.unit}\n{chart.note}", transform=axis.transAxes, fontsize=9.5, color=_SMALL)
    caption = "The embedded pair (6.1 M and 0.9 M parameters) on CPU cores"
    figure.supxlabel(caption, fontsize=9.5, color=_SMALL, x=0.005, ha="left")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.get_layout_engine().set(wspace=0.1)
    figure.savefig(to, dpi=150, facecolor="white", metadata={"Software": None, "Description": data(panels)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images" / "overview.png", help="%(default)s")
    arguments = parser.parse_args()
    draw(arguments.to)
    print(arguments.to)


if __name__ == "__main__":
    run_script(main)
