"""`spec-stack explain`: runs requests as a user's, and shows what was kept of each prompt in one self-contained page.

The page's data are values of JSON, which `page.js` draws: title; about: rows of name and value; turns. A turn has
question, metrics, steps (the records), text, answer (per token its text, step, writer), queries (text, weight), tokens
(their number by reason), dense (text and ttft_s of the answer to the whole prompt, or None) and rows: the prompt's
lines, each with its number of tokens, its heat (0 to 1: the mean importance) and parts of (text, reason, weight). The
reason is None for dropped text; the weight is that of a scoring query, 0 outside.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import date
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from spec_stack import __version__
from spec_stack.api.generator import SpecStackGenerator
from spec_stack.controller.base import StepRecord
from spec_stack.prefill.explanation import Explanation
from spec_stack.types import GenerationResult

_MAX_HEADING = 120
# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def explain_live(
    generator: SpecStackGenerator,
    *,
    source: str,
    pair: str,
    options: Mapping[str, Any],
    messages: Sequence[Mapping[str, str]] | None,
    questions: Sequence[str],
    compare: bool = False,
) -> dict[str, Any]:
    """Run questions as turns of a session after `messages`, or as plain texts without, and return the page's data.

    source: where the prompt is from. options: as in `generate`. compare: answer with dense prefill too.
    """
    # A process's first forward is slower than later ones.
    generator.generate(input_ids=[0] * 8, max_tokens=4, ignore_eos=True)
    results = _answers(generator, messages, questions, **options)
    dense: list[GenerationResult] = []
    if compare:
        dense = _answers(generator, messages, questions, **{**options, "sparse_prefill": "off"})
    metrics = results[0].metrics
    about = {
        "prompt": source,
        "pair": pair,
        "precision": f"{metrics.precision}, draft {metrics.draft_precision}",
        "policy": metrics.policy,
        "device": f"{generator.target.device}, threads: {torch.get_num_threads()}",
        "date": date.today().isoformat(),
    }
    turns = [view_of(generator, question, result) for question, result in zip(questions, results, strict=True)]
    for turn, result in zip(turns, dense, strict=False):
        turn["dense"] = {"text": result.text, "ttft_s": result.metrics.ttft_s}
    return {"title": turns[0]["question"], "about": about, "turns": turns}


def _answers(
    generator: SpecStackGenerator,
    messages: Sequence[Mapping[str, str]] | None,
    questions: Sequence[str],
    **options: Any,
) -> list[GenerationResult]:
    """The answers to questions as turns of a session, after the messages; None continues each as a plain text."""
    said, results = list(messages or ()), []
    # A session has a last step more, which prepares the next turn.
    with generator.session() if len(questions) > 1 else nullcontext(generator) as answering:
        for question in questions:
            said.append({"role": "user", "content": question})
            prompt: dict[str, Any] = {"prompt": question} if messages is None else {"messages": said}
            results.append(answering.generate(**prompt, **options, explain=True, return_records=True))
            said.append({"role": "assistant", "content": results[-1].text})
    return results


def view_of(generator: SpecStackGenerator, question: str, result: GenerationResult) -> dict[str, Any]:
    """A result with its explanation and records as a turn of the page."""
    explanation, records = result.explanation, result.records
    if explanation is None or records is None:
        raise ValueError("generate with explain=True and return_records=True")
    text, counts = explanation.text, Counter[str]()
    for span in explanation.kept:
        counts[span.reason] += span.num_tokens
    if explanation.queries and generator.config.prefill.queries_from_prompt:
        question = text[explanation.queries[0].start : explanation.queries[0].stop]
    return {
        "question": heading(question),
        "rows": rows_of(explanation),
        "queries": [
            {"text": text[query.start : query.stop], "weight": round(query.weight, 2)}
            for query in explanation.queries
            if query.weight >= 0.005
        ],
        "tokens": dict(counts),
        "text": result.text,
        "answer": written(records, generator.pair.pieces(result.token_ids) or []),
        "steps": [asdict(record) for record in records],
        "metrics": result.metrics.as_dict(),
        "dense": None,
    }


def rows_of(explanation: Explanation) -> list[dict[str, Any]]:
    """The prompt by line."""
    text, starts = explanation.text, list(accumulate(map(len, explanation.tokens), initial=0))
    lines = list(accumulate(map(len, text.splitlines(keepends=True)), initial=0))
    cuts = {*lines, *(edge for span in explanation.kept for edge in (span.start, span.stop))}
    cuts |= {edge for query in explanation.queries for edge in (query.start, query.stop)}
    reasons, weights = np.full(len(text), None), np.zeros(len(text))
    for kept in explanation.kept:
        reasons[kept.start : kept.stop] = kept.reason
    for query in reversed(explanation.queries):
        weights[query.start : query.stop] = query.weight
    rows: list[dict[str, Any]] = [{"parts": [], "tokens": 0, "heat": 0.0} for _ in pairwise(lines)]
    for start, stop in pairwise(sorted(cuts)):
        part = [text[start:stop], reasons[start], round(float(weights[start]), 2)]
        rows[bisect_right(lines, start) - 1]["parts"].append(part)
    owner = np.minimum(np.searchsorted(lines, starts[:-1], side="right") - 1, len(rows) - 1)
    sizes = np.bincount(owner, minlength=len(rows))
    for row, size in zip(rows, sizes.tolist(), strict=True):
        row["tokens"] = size
    if explanation.importance is not None:
        means = np.bincount(owner, weights=explanation.importance, minlength=len(rows)) / np.maximum(sizes, 1)
        # A few lines have nearly all of it: the root, over that of the highest hundredth.
        heats = np.sqrt(means / max(float(np.quantile(means, 0.99)), 1e-30)).clip(0, 1)
        for row, heat in zip(rows, heats.tolist(), strict=True):
            row["heat"] = round(heat, 2)
    return rows


def heading(text: str) -> str:
    """The last line, cut within words too: some scripts have no spaces."""
    last = text.strip().rsplit("\n", 1)[-1].strip()
    return last if len(last) <= _MAX_HEADING else f"{last[: _MAX_HEADING - 1]}…"


def file_name(source: str, text: str) -> str:
    """A name for a prompt's page."""
    words = re.findall(r"\w+", f"{source} {heading(text)}".lower())
    return f"explain-{'-'.join(words)[:60].strip('-')}.html"


def writers_of(record: StepRecord) -> list[str]:
    """The writer of each token of a step, (record.num_tokens,): "draft" (accepted), "correction", "bonus", "plain" (the
    target alone), or another proposer's name.

    Accepted tokens belong to the proposer; in a combined proposal the looked-up tokens are the last ones. The target's
    token is the bonus after full acceptance, else the correction, and "plain" without a proposal.
    """
    last = "plain" if not record.gamma else "bonus" if record.num_accepted == record.gamma else "correction"
    drafted = record.num_drafted_accepted if record.proposer.startswith("model") else 0
    other = record.proposer.removeprefix("model+")
    return [*["draft"] * drafted, *[other] * (record.num_accepted - drafted), last][: record.num_tokens]


def written(records: Sequence[StepRecord], texts: Sequence[str]) -> list[dict[str, Any]]:
    """An answer's tokens with their writers. texts: one per token. Raises ValueError if the numbers differ."""
    tokens = [(index, writer) for index, record in enumerate(records) for writer in writers_of(record)]
    if len(texts) != len(tokens):
        raise ValueError(f"{len(texts)} texts for {len(tokens)} tokens; give the records of the whole answer")
    return [
        {"text": text, "step": index, "writer": writer} for text, (index, writer) in zip(texts, tokens, strict=True)
    ]


def render(explanation: Mapping[str, Any]) -> str:
    """The page's HTML. Prompt and answer texts are never markup: they pass through JSON into text nodes."""
    room = files("spec_stack.explain")
    page = (room / "page.html").read_text(encoding="utf-8")
    data = json.dumps(explanation, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    places = {
        "title": html.escape(f"{explanation['title']} ({explanation['about']['prompt']})"),
        "version": html.escape(__version__),
        "style": (room / "page.css").read_text(encoding="utf-8"),
        "script": (room / "page.js").read_text(encoding="utf-8"),
        "data": data.translate(_ESCAPES),
    }
    # One pass, so that inserted text is never searched for places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], page)
