"""A calibration for people: as a table in a terminal, and as a picture."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from spec_stack.calibrate.choice import PAPER
from spec_stack.config import how_to_install
from spec_stack.prefill.calibration import HEAD_RATE, Calibration, Point, describe_setting


def format_calibration(calibration: Calibration) -> str:
    """Return what was chosen, as a table for a terminal."""
    config = calibration.apply()
    chosen = describe_setting(replace(config, keep_rate=0.2, min_prompt_tokens=2048))
    lines = [f"{'tokens':>7}  {'keep_rate':>9}  {'recall':>6}  {'TTFT':>8}  {'vs dense':>8}  setting"]
    for length, dense in calibration.dense_s.items():
        lines.append(f"{length:7d}  {1:9.2f}  {1:6.0%}  {dense * 1e3:5.0f} ms  {1:7.1f}x  dense")
        rows = [(describe_setting(PAPER), 0.2), (chosen, config.rate_for(length))]
        for setting, rate in rows:
            point = next(
                each
                for each in calibration.points
                if (each.setting, each.num_tokens, each.keep_rate) == (setting, length, rate)
            )
            lines.append(
                f"{length:7d}  {rate:9.2f}  {point.recall:6.0%}  {point.ttft_s * 1e3:5.0f} ms  "
                f"{dense / point.ttft_s:7.1f}x  {setting}"
            )
    lines += ["", f"{'evidence kept, by kind':24s}{'chosen':>8}{'default':>9}"]
    lines += [f"{kind:24s}{ours:8.0%}{papers:9.0%}" for kind, (ours, papers) in calibration.kinds.items()]
    ranked = sorted(calibration.head_recall.items(), key=lambda item: -item[1])
    shown = [f"{name} {recall:.0%}" for name, recall in ranked[:8]]
    lines += ["", f"heads alone at keep_rate {HEAD_RATE} (layer.head): {', '.join(shown)}"]
    lines += [f"prompts from {config.min_prompt_tokens} tokens on are pruned", *calibration.notes]
    return "\n".join(lines)


def check_plots() -> None:
    """Raise ValueError where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plots need matplotlib: {how_to_install('experiments')}")


def plot_calibration(calibration: Calibration, path: str | Path) -> None:
    """Recall against time to first token, a panel per length, the chosen point marked; written to an image file.

    Raises
    ------
    ValueError
        Without matplotlib.
    """
    check_plots()
    from matplotlib.figure import Figure

    config = calibration.apply()
    chosen = describe_setting(replace(config, keep_rate=0.2, min_prompt_tokens=2048))
    figure = Figure(figsize=(5 * len(calibration.dense_s), 4), layout="constrained")
    for column, (length, dense) in enumerate(calibration.dense_s.items(), start=1):
        axes = figure.add_subplot(1, len(calibration.dense_s), column)
        points = [point for point in calibration.points if point.num_tokens == length]
        groups = {"attention": "tab:blue", "anchors": "tab:orange", "fused": "tab:green"}
        for name, colour in groups.items():
            own = [point for point in points if _scorer_of(point) == name]
            axes.scatter(
                [dense / point.ttft_s for point in own],
                [point.recall for point in own],
                5,
                colour,
                alpha=0.3,
                label=name,
            )
        for setting, label, colour in (("default", "the paper's rule", "black"), (chosen, "chosen setting", "tab:red")):
            line = sorted((dense / point.ttft_s, point.recall) for point in points if point.setting == setting)
            axes.plot([x for x, _ in line], [y for _, y in line], color=colour, marker=".", label=label)
        rate = config.rate_for(length)
        for point in points:
            if point.setting == chosen and point.keep_rate == rate:
                axes.scatter([dense / point.ttft_s], [point.recall], 160, marker="*", color="tab:red", zorder=3)
        axes.set(title=f"{length} tokens", xlabel="dense TTFT / TTFT", ylabel="evidence kept", ylim=(0, 1))
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _scorer_of(point: Point) -> str:
    return next((name for name in ("anchors", "fused") if f"scorer={name}" in point.setting), "attention")
