"""The picture of README.md and of the documentation's first page, from the committed results.

python -m experiments.common.plot_overview
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import script
from experiments.common.headlines import load

ROOT = Path(__file__).parents[2]
_OTHERS, _OURS, _SMALL = "#9aa5a3", "#00796b", "#555555"


@dataclass(frozen=True)
class Chart:
    """One panel. bars: label to figure, in the order they are drawn; the last is this package's. digits: after the
    point."""

    title: str
    unit: str
    note: str
    bars: Mapping[str, float]
    digits: int


def charts() -> list[Chart]:
    """The three figures that matter most, as `experiments/results` has them."""
    speed = load("real_speed")
    num_tokens = max(int(length) for length in speed["lengths"])
    seconds = speed["lengths"][str(num_tokens)]
    ttft = {"dense": seconds["dense_ttft_s"], "SpecPrefill 0.2": seconds["paper 0.2"]["ttft_s"]}
    ttft |= {"calibrated 0.1": seconds["calibrated 0.1"]["ttft_s"]}
    ttft |= {"and window 512": seconds["calibrated 0.1, window 512"]["ttft_s"]}
    evidence, live = load("evidence_shapes_qwen_2k"), load("real_decode")
    names = {"paper": "SpecPrefill", "BM25": "BM25, no\u00a0draft", "default": "not calibrated"}
    names |= {"calibrated": "calibrated"}
    kept = {shown: evidence["whole"][name]["0.1"][0] * 100 for name, shown in names.items()}
    speed_of = {name: arm["speed_over_plain"][0] for name, arm in live["all"].items()}
    # At the best of its settings.
    assisted = max(speed for name, speed in speed_of.items() if name.startswith("assisted"))
    decoding = {"plain": speed_of["plain"], "HF, assisted": assisted, "HF, look-up": speed_of["look-up 10"]}
    decoding |= {"draft alone": speed_of["draft"], "default": speed_of["default"]}
    prompt = f"{num_tokens:,}-token prompt; behind a name, the share kept"
    unseen = f"unseen prompts of 2K in {len(evidence['shape'])} shapes, 10 % kept"
    tasks = f"{live['num_prompts']} prompts live: code, maths, chat, summaries, edits"
    return [
        Chart("Time to first token", "seconds, lower is better", prompt, ttft, 1),
        Chart("Evidence kept", "% of prompts whose evidence is kept whole", unseen, kept, 0),
        Chart("Decoding", "speed over plain decoding, higher is better", tasks, decoding, 2),
    ]


def data(panels: Sequence[Chart]) -> str:
    """The bars as JSON. The picture carries it, so that a test can tell whether it shows the results of today."""
    return json.dumps({panel.title: panel.bars for panel in panels}, ensure_ascii=True)


def draw(to: Path) -> None:
    """Write the picture, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    plt.rcParams.update({"font.size": 11})
    panels = charts()
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.7), layout=ConstrainedLayoutEngine(wspace=0.06))
    for axis, chart in zip(axes, panels, strict=True):
        places = range(len(chart.bars))
        colours = [_OTHERS] * (len(chart.bars) - 1) + [_OURS]
        axis.bar(places, list(chart.bars.values()), color=colours, width=0.62)
        for place, value in enumerate(chart.bars.values()):
            axis.text(place, value, f"{value:.{chart.digits}f}", ha="center", va="bottom", fontweight="bold")
        axis.set_xticks(places, [name.replace(" ", "\n", 1) for name in chart.bars])
        axis.set_ylim(0, max(chart.bars.values()) * 1.15)
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="x", length=0, labelsize=9)
        axis.set_title(f"{chart.title}\n\n", loc="left", fontweight="bold", fontsize=13)
        axis.text(0, 1.03, f"{chart.unit}\n{chart.note}", transform=axis.transAxes, fontsize=9.5, color=_SMALL)
    caption = "Qwen2.5-Coder 1.5B, 0.5B draft, bf16, two AMD EPYC cores (decoding: one)"
    figure.supxlabel(caption, fontsize=9.5, color=_SMALL, x=0.005, ha="left")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150, facecolor="white", metadata={"Software": None, "Description": data(panels)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images" / "overview.png", help="%(default)s")
    arguments = parser.parse_args()
    draw(arguments.to)
    print(arguments.to)


if __name__ == "__main__":
    script.run(main)
