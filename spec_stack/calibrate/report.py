"""The report of a calibration: a terminal table."""

from __future__ import annotations

from spec_stack.prefill.calibration import Calibration, describe_setting

_SHOWN_HEADS = 8


def format_calibration(calibration: Calibration) -> str:
    """The choice and its recall as a terminal table."""
    config = calibration.apply()
    lines = [f"chosen: {describe_setting(config)}"]
    if config.scoring_heads:
        named = ", ".join(f"{layer}.{head}" for layer, head in config.scoring_heads)
        lines.append(f"heads (layer.head): {named}; {1 + max(layer for layer, _ in config.scoring_heads)} layers run")
    if calibration.points:
        lines += ["", *_by_length(calibration), "", *_by_kind(calibration)]
    ranked = sorted(calibration.head_recall.items(), key=lambda item: -item[1])[:_SHOWN_HEADS]
    if ranked:
        lines += ["", "heads alone, kept at 0.2: " + ", ".join(f"{name} {recall:.0%}" for name, recall in ranked)]
    lines += ["", f"prompts from {config.min_prompt_tokens} tokens on are pruned", *calibration.notes]
    if calibration.unfinished:
        lines.append(f"{calibration.num_prompts} prompts were judged; {calibration.unfinished} are left.")
    return "\n".join(lines)


def _by_length(calibration: Calibration) -> list[str]:
    """Recall at every length and share, by rule."""
    rates = list(dict.fromkeys(point.keep_rate for point in calibration.points))
    found = {(point.setting, point.num_tokens, point.keep_rate): point.recall for point in calibration.points}
    lines = [f"{'evidence kept at':32}" + "".join(f"{rate:7.3g}" for rate in rates)]
    for setting, length in dict.fromkeys((point.setting, point.num_tokens) for point in calibration.points):
        cells = [found.get((setting, length, rate)) for rate in rates]
        shown = "".join(f"{'':7}" if cell is None else f"{cell:7.0%}" for cell in cells)
        name = setting if setting in ("default", "BM25") else f"chosen, at {calibration.apply().rate_for(length):.3g}"
        lines.append(f"{length:7d} tokens  {name:16}{shown}")
    return lines


def _by_kind(calibration: Calibration) -> list[str]:
    names = list(dict.fromkeys(name for shares in calibration.kinds.values() for name in shares if name != "prompts"))
    lines = [f"{'by kind':24}{'prompts':>8}{''.join(f'{name:>9}' for name in names)}     lost"]
    for kind, shares in calibration.kinds.items():
        cells = "".join(f"{shares.get(name, 0):9.0%}" for name in names)
        lines.append(f"{kind:24}{shares.get('prompts', 0):8.0f}{cells}{1 - shares.get('chosen', 0):9.0%}")
    return lines
