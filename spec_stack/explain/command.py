"""Runs requests for `spec-stack explain`, and renders the page: one self-contained HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.resources import files
from typing import Any

import torch

from spec_stack import __version__
from spec_stack.api.generator import SpecStackGenerator
from spec_stack.explain.data import Explanation
from spec_stack.explain.observe import watch

# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def explain_live(
    generator: SpecStackGenerator,
    *,
    title: str,
    pair: str,
    options: Mapping[str, Any],
    messages: Sequence[Mapping[str, str]] | None,
    questions: Sequence[str],
    compare: bool = False,
) -> Explanation:
    """Run questions as turns of a session after `messages`, or as plain texts without, and return the page data.

    generator: from `observe.watching`. compare: run again with dense prefill and the same decoding.
    """
    # A process's first forward is slower than later ones.
    generator.generate(input_ids=[0] * 8, max_tokens=4, ignore_eos=True)
    ways = {"sparse prefill" if compare else "this run": dict(options)}
    if compare:
        ways["dense prefill"] = {**options, "sparse_prefill": "off"}
    runs = [watch(generator, name, messages, questions, **own) for name, own in ways.items()]
    metrics = runs[0].turns[0].metrics
    about = {
        "pair": pair,
        "precision": f"{metrics['precision']}, draft {metrics['draft_precision']}",
        "policy": str(metrics["policy"]),
        "device": f"{generator.target.device}, {torch.get_num_threads()} threads",
        "date": date.today().isoformat(),
    }
    return Explanation(title, about, runs)


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
