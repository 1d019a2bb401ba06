"""`spec-stack doctor --measure --prompts`: reads prompts, makes some of documents, and prints the report."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

from spec_stack.api.fidelity import FidelityReport, Interval, SettingFidelity, prompt_of
from spec_stack.calibrate.shapes import SHAPES
from spec_stack.cli.chat import read_document
from spec_stack.cli.demo import aligned

# Most tokens of a document.
_LONGEST = 8192
_SHARE_OF_LIMIT = 0.9
# Shapes of a document's prompts, with a question each; and an instruction without one.
_SHAPES = ("question last", "question first", "long format")
_SUMMARY = "Summarize the text above in three sentences."
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
# Words of a sentence that a question is about, and of the phrase that it names.
_FEWEST_WORDS, _MOST_WORDS, _PHRASE = 6, 60, 3
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


def document_prompts(paths: Sequence[Path], tokenizer: Any, max_positions: int) -> list[str]:
    """Prompts over documents: questions about single sentences, in several places, and a request for a summary.

    Raises ValueError for a file that cannot be read and for a document without sentences.
    """
    longest = min(_LONGEST, round(_SHARE_OF_LIMIT * max_positions))
    prompts = []
    for path in paths:
        text = read_document(path)
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > longest:
            text = tokenizer.decode(ids[:longest])
        questions = _questions(text, len(_SHAPES), random.Random(0))
        if not questions:
            raise ValueError(f"{path} has no sentences to ask about")
        prompts += [SHAPES[shape](text, question) for shape, question in zip(_SHAPES, questions, strict=False)]
        prompts.append(f"{text}\n\n{_SUMMARY}")
    return prompts


def _questions(text: str, count: int, rng: random.Random) -> list[str]:
    """Questions about sentences that lie apart, each by the rarest phrase of its sentence."""
    frequency = Counter(text.lower().split())
    sentences = [each.split() for each in _SENTENCE.split(text)]
    sentences = [words for words in sentences if _FEWEST_WORDS <= len(words) <= _MOST_WORDS]
    borders = [round(part * len(sentences) / count) for part in range(count + 1)]
    chosen = [sentences[rng.randrange(start, stop)] for start, stop in pairwise(borders) if start < stop]
    return [f'What does the text say about "{_rarest(words, frequency)}"?' for words in chosen]


def _rarest(words: Sequence[str], frequency: Counter[str]) -> str:
    """The run of words with the fewest occurrences in the text."""
    runs = [words[at : at + _PHRASE] for at in range(len(words) - _PHRASE + 1)]
    rarest = min(runs, key=lambda run: sum(frequency[word.lower()] for word in run))
    return " ".join(rarest).strip(".,;:!?\"'()")


def fidelity_lines(report: FidelityReport) -> list[str]:
    """The report for a terminal."""
    lengths = sorted(row.num_tokens for row in report.prompts)
    head = f"{len(report.prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, pruned at every keep rate"
    table = aligned([_HEADER, *map(_row, report.settings)])
    lines = [head, "", *table, "", _LEGEND, _verdict(report), _by_kind(report)]
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


_HEADER = ("keep rate", "kept", "TTFT speed-up", "nats/token", "perplexity ratio", "tokens", "answers")
_LEGEND = "nats/token: loss of the dense answers' tokens above dense. tokens, answers: shares that stay the same."


def _row(found: SettingFidelity) -> tuple[str, ...]:
    return (
        found.setting,
        f"{found.kept:.0%}",
        _with_ends(found.speedup, ".2f"),
        f"{found.lost.value:+.3f}",
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


def _by_kind(report: FidelityReport) -> str:
    """What every kind of prompt loses, the worst one first."""
    by_kind = sorted(report.shown.lost_by_kind.items(), key=lambda item: -item[1].value)
    counts = Counter(row.kind for row in report.prompts)
    told = [f"{kind} {lost.value:+.3f} ({counts[kind]} prompts)" for kind, lost in by_kind]
    return f"nats/token lost at {report.shown.setting}, most first: {', '.join(told)}"
