"""`spec-stack doctor --measure --prompts`: reads prompts, and prints the report."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Any

from spec_stack.api.fidelity import FidelityReport, Interval, SettingFidelity, prompt_of
from spec_stack.cli.chat import read_document
from spec_stack.cli.demo import aligned

_ANSWER_CHARACTERS = 300


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a JSON Lines file, one a line. Raises ValueError, naming the line, for anything else."""
    lines = read_document(path).split("\n")
    prompts = [_prompt_of(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} is empty; give a line of JSON per prompt")
    return prompts


def _prompt_of(place: str, line: str) -> dict[str, Any]:
    """A line's prompt, checked."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a JSON object, got {type(value).__name__}")
    prompt_of(value, place)
    return value


def fidelity_lines(report: FidelityReport) -> list[str]:
    """The report for a terminal."""
    lengths = sorted(row.num_tokens for row in report.prompts)
    head = f"{len(report.prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, pruned at every keep rate"
    table = aligned([_HEADER, *map(_row, report.settings)])
    lines = [head, "", *table, "", _LEGEND, _verdict(report)]
    if report.num_short:
        lines.append(
            f"{report.num_short} prompts are shorter than min_prompt_tokens: sparse_prefill='auto' leaves them dense"
        )
    if report.num_left:
        lines.append(f"{report.num_left} prompts are left: the time was over; give more --minutes")
    lines += [f"left out: prompt {number}, {reason}" for number, reason in report.skipped]
    setting = report.shown.setting
    for example in report.examples:
        prompt = example.prompt
        lines += [
            "",
            f"prompt {prompt.number}, {example.what} at {setting}: {prompt.lost(setting):+.3f} nats/token",
            f"  dense:  {shorten(prompt.answer, _ANSWER_CHARACTERS, placeholder=' …')}",
            f"  pruned: {shorten(example.pruned_answer, _ANSWER_CHARACTERS, placeholder=' …')}",
        ]
    return lines


_HEADER = ("keep rate", "kept", "TTFT speed-up", "perplexity ratio", "tokens", "answers")
_LEGEND = "perplexity ratio: of the dense answers, over dense prefill. tokens, answers: shares that stay the same."


def _row(found: SettingFidelity) -> tuple[str, ...]:
    return (
        found.setting,
        f"{found.kept:.0%}",
        _with_ends(found.speedup, ".2f"),
        _with_ends(found.perplexity_ratio, ".3f"),
        f"{found.token_agreement:.0%}",
        f"{found.answer_agreement:.0%}",
    )


def _with_ends(found: Interval, digits: str) -> str:
    return f"{found.value:{digits}} [{found.low:{digits}}, {found.high:{digits}}]"


def _verdict(report: FidelityReport) -> str:
    """The fastest setting within the limit, and how sure that is."""
    shown, limit = report.shown, 1 + report.within
    ratio = _with_ends(shown.perplexity_ratio, ".3f")
    if report.fastest is None:
        return (
            f"no setting is within {report.within:.0%}: {shown.setting} loses least, perplexity ratio {ratio}; prefill "
            "these prompts densely, or keep more"
        )
    surely = "" if shown.perplexity_ratio.high <= limit else "; the interval reaches past it, so measure more prompts"
    return (
        f"fastest within {report.within:.0%}: keep_rate {shown.setting}, first token {shown.speedup.value:.1f}x "
        f"sooner, perplexity ratio {ratio}{surely}"
    )
