"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from spec_stack import __version__
from spec_stack.explain.data import Explanation

_PARTS = ("page.css", "page.js")
# Inside a script element these could end it, or a comment in it begin; in JSON they stand only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def render(explanation: Explanation) -> str:
    """The page as text. No text of a prompt or an answer is ever markup: it goes through JSON into text nodes."""
    room = files("spec_stack.explain")
    page = (room / "page.html").read_text(encoding="utf-8")
    style, script = ((room / name).read_text(encoding="utf-8") for name in _PARTS)
    data = json.dumps(explanation.as_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    slots = {
        "{{title}}": html.escape(explanation.title),
        "{{version}}": html.escape(__version__),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": data.translate(_ESCAPES),
    }
    # Cut at the slots, and so never looked for in what was filled in.
    for slot in slots:
        if page.count(slot) != 1:
            raise RuntimeError(f"page.html must hold {slot} once")
    parts = sorted(slots, key=page.index)
    done = ""
    for slot in parts:
        before, page = page.split(slot, 1)
        done += before + slots[slot]
    return done + page
