"""The page: what it holds, and its HTML, one self-contained file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from spec_stack import __version__
from spec_stack.controller.base import StepRecord

STATE_LETTERS = {"kept": "k", "dropped": "d", "protected": "p", "recalled": "r", "cached": "c"}
"""One letter per token state."""
# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


@dataclass(frozen=True)
class WrittenToken:
    """A token of the answer. step: index of its step. writer: "draft" (accepted), "correction", "bonus", "plain" (the
    target alone), or another proposer's name."""

    text: str
    step: int
    writer: str


@dataclass(frozen=True)
class QuerySegment:
    """A segment of scoring queries: tokens start…stop of the prompt, or of the look-ahead after it. weight: of its
    queries, 0 to 1; the largest one within a question."""

    start: int
    stop: int
    weight: float
    text: str


@dataclass(frozen=True)
class PromptView:
    """A prompt of N tokens.

    states: one of STATE_LETTERS per token. importance: (N,) from the draft, or None. votes: the selection's scores per
    segment (line or chunk), or None. borders: token starts of the segments and the last end; a session scores only new
    text, so they may start after 0. queries: by falling weight.
    """

    tokens: list[str]
    states: str
    importance: list[float] | None = None
    votes: list[float] | None = None
    borders: list[int] | None = None
    queries: list[QuerySegment] = field(default_factory=list)


@dataclass(frozen=True)
class TurnView:
    """A request and its answer.

    question: a short heading. steps: the first one prefills. metrics: from `types.Metrics.as_dict`.
    """

    question: str
    prompt: PromptView
    answer: list[WrittenToken]
    steps: list[StepRecord]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunView:
    """A request, or a session's turns, under one setting."""

    name: str
    turns: list[TurnView]


@dataclass(frozen=True)
class Explanation:
    """The page's contents. about: rows of name and value. runs: one, or several shown side by side."""

    title: str
    about: dict[str, str]
    runs: list[RunView]


def writers_of(record: StepRecord) -> list[str]:
    """The writer of each token of a step, (record.num_tokens,).

    Accepted tokens belong to the proposer; in a combined proposal the looked-up tokens are the last ones. The target's
    token is the bonus after full acceptance, else the correction, and "plain" without a proposal.
    """
    last = "plain" if not record.gamma else "bonus" if record.num_accepted == record.gamma else "correction"
    drafted = record.num_drafted_accepted if record.proposer.startswith("model") else 0
    other = record.proposer.removeprefix("model+")
    return [*["draft"] * drafted, *[other] * (record.num_accepted - drafted), last][: record.num_tokens]


def written(records: Sequence[StepRecord], texts: Sequence[str]) -> list[WrittenToken]:
    """An answer's tokens with their writers. texts: one per token. Raises ValueError if the numbers differ."""
    tokens = [(index, writer) for index, record in enumerate(records) for writer in writers_of(record)]
    if len(texts) != len(tokens):
        raise ValueError(f"{len(texts)} texts for {len(tokens)} tokens; give the records of the whole answer")
    return [WrittenToken(text, index, writer) for text, (index, writer) in zip(texts, tokens, strict=True)]


def render(explanation: Explanation) -> str:
    """The page's HTML. Prompt and answer texts are never markup: they pass through JSON into text nodes."""
    room = files("spec_stack.explain")
    page = (room / "page.html").read_text(encoding="utf-8")
    data = json.dumps(asdict(explanation), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    slots = {
        "title": html.escape(explanation.title),
        "version": html.escape(__version__),
        "style": (room / "page.css").read_text(encoding="utf-8"),
        "script": (room / "page.js").read_text(encoding="utf-8"),
        "data": data.translate(_ESCAPES),
    }
    # One pass, so that inserted text is never searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], page)
