"""The page: its HTML, one self-contained file, and who wrote each token.

Its data are values of JSON, which `observe.explain_live` makes and `page.js` draws:

- title; about: rows of name and value; runs: one, or several shown side by side, each with a name and its turns.
- A turn: question: a short heading; prompt; answer: per token its text, the index of its step, and its writer; steps:
  the records, of which the first one prefills; metrics.
- A prompt of N tokens: tokens: their texts; states: one of STATE_LETTERS per token; importance: (N,) from the draft, or
  None; votes: the selection's scores per segment (line or chunk), or None; borders: token starts of the segments and
  the last end, which may start after 0, since a session scores only new text; queries: the segments of scoring queries
  by falling weight, each with start and stop in the prompt or the look-ahead after it, weight (0 to 1) and text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from spec_stack import __version__
from spec_stack.controller.base import StepRecord

STATE_LETTERS = {"kept": "k", "dropped": "d", "protected": "p", "recalled": "r", "cached": "c"}
"""One letter per token state."""
# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


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
    slots = {
        "title": html.escape(explanation["title"]),
        "version": html.escape(__version__),
        "style": (room / "page.css").read_text(encoding="utf-8"),
        "script": (room / "page.js").read_text(encoding="utf-8"),
        "data": data.translate(_ESCAPES),
    }
    # One pass, so that inserted text is never searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], page)
