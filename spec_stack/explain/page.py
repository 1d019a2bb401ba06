"""The page: one self-contained HTML file."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files

from spec_stack import __version__
from spec_stack.explain.data import Explanation

# They could end a script element or open a comment; in JSON they occur only in strings.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def render(explanation: Explanation) -> str:
    """The page's HTML. Prompt and answer texts are never markup: they pass through JSON into text nodes."""
    room = files("spec_stack.explain")
    page = (room / "page.html").read_text(encoding="utf-8")
    data = json.dumps(explanation.as_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    slots = {
        "title": html.escape(explanation.title),
        "version": html.escape(__version__),
        "style": (room / "page.css").read_text(encoding="utf-8"),
        "script": (room / "page.js").read_text(encoding="utf-8"),
        "data": data.translate(_ESCAPES),
    }
    # One pass, so that inserted text is never searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], page)
