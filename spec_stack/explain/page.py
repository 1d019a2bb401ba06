"""The page: one self-contained HTML file."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from spec_stack import __version__
from spec_stack.explain.data import Explanation

_PARTS = ("page.css", "page.js")
# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def render(explanation: Explanation) -> str:
    """The page's HTML. Prompt and answer texts are never markup: they pass through JSON into text nodes."""
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
    # Split at the slots first, so that inserted text is never searched for them.
    for slot in slots:
        if page.count(slot) != 1:
            raise RuntimeError(f"page.html must hold {slot} once")
    parts = sorted(slots, key=page.index)
    done = ""
    for slot in parts:
        before, page = page.split(slot, 1)
        done += before + slots[slot]
    return done + page
