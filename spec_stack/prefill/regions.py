"""Regions of a text: fenced blocks, here-documents, comments and branches of C, by their first and last lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spec_stack.prefill.long_lines import Size
from spec_stack.prefill.text_lines import LONGEST_BLOCK, LONGEST_RECORD, Line

_FENCE, _FENCES = "```", ("```", "~~~")
_HERE_DOCUMENT = re.compile("<<[-~]?\\s?[\"']?([A-Z][A-Z_]{1,20})\\b")
_COMMENTS = {"/*": "*/", "<!--": "-->"}
_BRANCH, _END_OF_BRANCH = re.compile("#\\s?if(?:n?def)?\\b"), re.compile("#\\s?endif\\b")
ELSE = re.compile("#\\s?el(?:se|if)\\b")


def find_regions(lines: Sequence[Line], size: Size) -> dict[int, int]:
    """The first and last lines of fenced blocks, comments, here-documents and branches of C. A short one is a unit."""
    regions: dict[int, int] = {}
    branches: list[tuple[int, bool]] = []
    opened, closer = -1, ""
    for at, line in enumerate(lines):
        content = line.content
        if content.startswith("#") and opened < 0:
            # A branch without another one says little; one of them guards a file against being read twice.
            if _BRANCH.match(content):
                branches.append((at, content.endswith(" 0")))
            elif ELSE.match(content) and branches:
                branches[-1] = (branches[-1][0], True)
            elif _END_OF_BRANCH.match(content) and branches:
                first, is_needed = branches.pop()
                if is_needed:
                    regions[first] = at
        elif content.startswith(_FENCES) and (opened < 0 or closer != _FENCE):
            opened, closer = at, _FENCE
        elif opened < 0:
            opened, closer = at, _closer(content)
            opened = at if closer else -1
        elif _closes(content, closer):
            # Of comments of C, those that hold code.
            inside = lines[opened : at + 1]
            if closer != "*/" or 2 * sum(inner.content.endswith((";", "}")) for inner in inside[1:]) >= len(inside) - 1:
                regions[opened] = at
                for inner in inside:
                    inner.is_text, inner.is_inside = False, True
                if size(inside[0].start, line.stop) <= (LONGEST_RECORD if closer == _FENCE else LONGEST_BLOCK):
                    del regions[opened]
                    inside[0].last = at
            opened = -1
    return regions


def _closer(content: str) -> str:
    """What ends the comment or here-document that a line opens, or nothing."""
    found = _HERE_DOCUMENT.search(content)
    if found:
        return found[1]
    for opener, closer in _COMMENTS.items():
        if content.startswith(opener) and closer not in content:
            return closer
    return ""


def _closes(content: str, closer: str) -> bool:
    if closer == _FENCE:
        return content.startswith(_FENCES) and not content.strip("`~")
    return content == closer or (closer in _COMMENTS.values() and closer in content)
