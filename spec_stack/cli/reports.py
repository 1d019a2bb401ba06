"""Reports for a terminal: of a pair's speed, of fidelity, and of the demo."""

from __future__ import annotations

from collections import Counter
from textwrap import shorten
from typing import Any

from spec_stack.bench.arms import PLAIN
from spec_stack.bench.fidelity import FidelityReport, SettingFidelity
from spec_stack.bench.leaderboard import aligned
from spec_stack.bench.pair import PairReport

_ANSWER_CHARACTERS = 300


def pair_lines(report: PairReport) -> list[str]:
    """A pair's speed, line by line, with the verdict at the end."""
    told = []
    for run in report.first_tokens:
        r, rest = run.scoring_s / run.dense_s, (run.sparse_s - run.scoring_s) / run.dense_s
        told.append(
            f"at {run.num_tokens} tokens: dense {run.dense_s:.2f} s, sparse {run.sparse_s:.2f} s, {run.speedup:.1f}x; "
            f"of the dense prefill the draft costs r = {r:.2f}, all the rest s = {rest:.2f}"
        )
    if report.answers:
        plain, default = report.answer(PLAIN), report.answer("default")
        told.append(
            f"answers: {plain.tokens_per_s:.1f} tokens/s plain, {default.tokens_per_s:.1f} with the draft "
            f"({default.speed:.2f}x; {default.acceptance or 0:.0%} of proposed tokens accepted, "
            f"{default.num_prompts} prompts)"
        )
    if report.left_out:
        told.append(f"left out, for the time: {', '.join(report.left_out)}")
    return [*told, report.verdict]


def fidelity_lines(report: FidelityReport) -> list[str]:
    """The report for a terminal."""
    lengths = sorted(row.num_tokens for row in report.prompts)
    head = f"{len(report.prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, pruned at every keep rate"
    table = aligned([_HEADER, *map(_row, report.settings)])
    lines = [head, "", *table, "", _LEGEND, _fidelity_verdict(report), _by_kind(report)]
    if report.num_short:
        lines.append(
            f"{report.num_short} prompts are shorter than min_prompt_tokens: sparse_prefill='auto' leaves them dense"
        )
    if report.num_left:
        lines.append(f"{report.num_left} prompts are left: the time was over; the same command goes on from there")
    lines += [f"left out: prompt {number}, {reason}" for number, reason in report.skipped]
    setting = report.shown.setting
    for example in report.examples:
        prompt, lost = example.prompt, f"{example.prompt.lost(setting):+.3f}"
        lines += [
            "",
            f"prompt {prompt.number}, {example.what} at {setting}: {prompt.kind}, {lost} nats/token",
            f"  asked:  {prompt.question}",
            f"  dense:  {shorten(prompt.answer, _ANSWER_CHARACTERS, placeholder=' …')}",
            f"  pruned: {shorten(example.pruned_answer, _ANSWER_CHARACTERS, placeholder=' …')}",
        ]
    return lines


_HEADER = ("keep rate", "kept", "whole", "TTFT speed-up", "nats/token", "perplexity ratio", "tokens", "answers")
_LEGEND = (
    "whole: share of prompts kept whole. nats/token: loss of the dense answers' tokens above dense. tokens, answers: "
    "shares that stay the same."
)


def _row(found: SettingFidelity) -> tuple[str, ...]:
    return (
        found.setting,
        f"{found.kept:.0%}",
        f"{found.whole:.0%}",
        f"{found.speedup:.2f}",
        f"{found.lost.value:+.3f}",
        f"{found.perplexity_ratio:.3f}",
        f"{found.token_agreement:.0%}",
        f"{found.answer_agreement:.0%}",
    )


def _fidelity_verdict(report: FidelityReport) -> str:
    """The fastest setting whose upper bound is within the limit, and how many prompts a faster one needs."""
    within, promising = f"within {report.within:.0%}", report.promising
    more = ""
    if promising is not None:
        more = (
            f"keep_rate {_told(promising)}, may be, but {len(report.prompts)} prompts do not show it; about "
            f"{report.num_needed(promising):.0f} like these would"
        )
    if report.fastest is not None:
        return f"fastest {within}, by the upper bound: keep_rate {_told(report.fastest)}{more and f'; {more}'}"
    if more:
        return f"no setting is surely {within}: {more}"
    shown = report.shown
    return (
        f"no setting is {within}: {shown.setting} loses least, perplexity ratio {shown.perplexity_ratio:.3f}; prefill "
        "these prompts densely, or keep more"
    )


def _told(found: SettingFidelity) -> str:
    return (
        f"{found.setting}, first token {found.speedup.value:.1f}x sooner, perplexity ratio {found.perplexity_ratio:.3f}"
    )


def _by_kind(report: FidelityReport) -> str:
    """What every kind of prompt loses, the worst one first."""
    by_kind = sorted(report.shown.lost_by_kind.items(), key=lambda item: -item[1].value)
    counts = Counter(row.kind for row in report.prompts)
    told = [f"{kind} {lost.value:+.3f} ({counts[kind]} prompts)" for kind, lost in by_kind]
    return f"nats/token lost at {report.shown.setting}, most first: {', '.join(told)}"


def format_demo(report: dict[str, Any]) -> str:
    """The report as a terminal table."""
    columns = list(report["modes"].values())
    acceptance = ["–" if c["acceptance_rate"] is None else f"{c['acceptance_rate']:.0%}" for c in columns]
    speeds = [f"{c['decode_tokens_per_s']:.0f} tokens/s" for c in columns]
    table = [
        ("", "dense + plain", "sparse + speculative", ""),
        ("prompt tokens prefilled", *(f"{c['kept_tokens']:,} of {c['prompt_tokens']:,}" for c in columns), ""),
        ("share of the prompt kept", *(f"{c['keep_rate']:.0%}" for c in columns), ""),
        ("time to first token", *(f"{c['ttft_s']:.2f} s" for c in columns), f"{report['ttft_ratio']:.1f}x sooner"),
        ("decoding", *speeds, f"{report['decode_ratio']:.1f}x faster"),
        ("tokens per step", *(f"{c['tokens_per_step']:.2f}" for c in columns), ""),
        ("drafted tokens accepted", *acceptance, ""),
        ("fact found", *("yes" if c["correct"] else "no" for c in columns), f"expected {report['expected']}"),
    ]
    verdict = "the same tokens as" if report["lossless"] else "NOT the same tokens as"
    lines = [
        *aligned(table),
        "",
        f"Q: {report['question']}",
        *(f"A ({mode}): {row['answer']}" for mode, row in report["modes"].items()),
        "",
        f"Speculative decoding gave {verdict} plain greedy decoding over the same sparse prefill.",
    ]
    return "\n".join(lines)
