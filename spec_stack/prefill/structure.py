"""What of a text means something alone: lines, sentences of prose, small blocks; and the heads that others need. Pure.

A line is kept or dropped whole, with the breaks that end it, unless it is prose or too long. Lines that need each
other (a record of JSON, a call over several lines, a small function, a fenced block) are one unit. A unit's head is
kept with it: the first row of a table, a key or a clause over indented lines, the line that speaks of a list, a
heading, a fence, the file and the place of a change, the speaker of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spec_stack.prefill.listings import find_listings, split_listings
from spec_stack.prefill.long_lines import Size, cut_long
from spec_stack.prefill.paragraphs import ITEM, OPENERS, find_paragraphs, last_line
from spec_stack.prefill.regions import ELSE, find_regions
from spec_stack.prefill.sentences import ends_sentence, label_end, sentence_ends
from spec_stack.prefill.tables import RULE, find_tables
from spec_stack.prefill.text_lines import LONGEST_BLOCK, LONGEST_RECORD, Line, runs

LONGEST_UNIT = 128
"""Most tokens of a segment; a longer one is cut (`long_lines.cut_long`)."""
LONGEST_HEAD = 48
"""Most tokens of a head; a longer one is not kept for others."""

# The first line of a record, which the next one names.
_UNNAMED = re.compile("(?:- )?[\\[({]+|<\\w[^<>]{0,80}>")
_CLOSER = re.compile("[)\\]}]|</|(?:end|fi|done|esac)\\b")
# Of diffs: the lines behind the one that names a file, and that of a place in it.
_OF_FILE = re.compile("index |--- |\\+\\+\\+ |(?:new|deleted) file |(?:old|new) mode |similarity |rename |copy ")
_PLACE = re.compile("@@ -\\d")
# A name, of more forms in quotes or without blanks, with what opens lines; an element, a type, a call or a tag.
_KEY = re.compile(
    '(?:- )?(?:["\']?\\w[\\w ./-]{0,40}["\']?|"[^"]{1,80}"|[\\w.-]{1,80})'
    "(?:\\s?(?:[:=]\\s?[\\[{(]?|[\\[{])|:\\s[&!]\\S{0,40}|"
    "(?:\\[[^\\[\\]]{1,40}\\]|:[^=]{1,60})?\\s?=\\s?(?:[\\w. ]{0,20}\\()?[\\[{(])(?:\\s+(?:#|//)\\s.{0,120})?"
)
# What opens lines below it in any other form.
_OPENER = re.compile("[:\uff1a\\[{(][*_\"')]*(?:\\s+(?:#|//)\\s.*|\\s[&!|>]\\S*)?\\Z")
_STATEMENT = re.compile("(?:if|elif|for|while|with|except|case|match|async)\\b")
_TIME = re.compile("\\(?\\d{1,2}[:.]\\d\\d(?:[:.]\\d\\d)?(?: ?[AaPp][Mm])?[)\\]]?\\Z")
# What opens a scope with a name in code, over the lines that are indented below it.
_SCOPE = re.compile(
    "(?:(?:export|default|public|private|protected|internal|static|final|abstract|async|virtual|override|inline|pub"
    "(?:\\(\\w{1,20}\\))?|unsafe|data|sealed)\\s){0,6}+(?:(?:def|class|func|fn|fun|function|struct|enum|interface|"
    "trait|impl|namespace|module|record|object|type)\\b|(?:const|let|var)\\s[\\w$]{1,40}+\\s?=.*\\{\\Z)|"
    "(?!(?:if|for|foreach|while|switch|catch|else|elif|try|except|do|with|return|using|lock|unless|when|match|loop|select|typedef|"
    "case|assert|await)\\b)(?:[^\\W\\d][^={}();]{0,80}+\\([^;]*+(?<=\\{)\\Z|"
    # Blocks of Terraform, SQL and CSS.
    "(?:[.#@*&:]{0,2}[^\\W\\d]|@media\\b.*\\))[^={}();]{0,120}+(?:\\{|(?<=\\s)\\()\\Z)"
)
# What names all lines up to the next such line: "[server]", "==> a.txt <==", "== Use ==", a letter's sender, a commit,
# a document's tag or its source.
_SECTION = re.compile(
    '\\[{1,2} ?[A-Za-z][\\w.:/ "-]{0,60}\\]{1,2}(?:\\s+[#;].{0,80})?|[=_*#~-]{2,40}+>? \\S.{0,80}? <?[=_*#~-]{2,40}|'
    "\\*\\*[^*]{1,60}\\*\\*:?|From: \\S.{0,80}|commit [0-9a-f]{7,40}(?: \\(.{1,160}\\))?|"
    "\\\\(?:part|chapter|(?:sub){0,2}section|paragraph)\\*?\\{.{1,120}|<([hH][1-6])\\b[^<>]{0,80}>.{1,120}</\\1>|"
    "<(?:document|doc|file|source|page|article|title|path)\\b[^<>]{0,80}>(?:[^<>]{1,80}</\\w{1,10}>)?"
)
_END_OF_SECTION = re.compile("</(?:document|doc|file|page|article)>|.*(?:\"\"\"|''')")
_STARTS_ANEW = re.compile("From:|commit |<")
# Below a section in brackets, another one of any form.
_BRACKETS = re.compile("\\[[^\\[\\]]{1,80}\\](?:\\s+[#;].{0,80})?")
_UNDERLINE = re.compile('([=~^*"+-])\\1*+')
# What names the lines that stand directly below it: a question of a list, a speaker with the time or in capitals, a
# term, a file over its numbered lines.
_LONGEST_CAPTION = 160
_CAPTION = re.compile(
    "(?:Q|Question|Frage) ?\\d{0,3}(?: ?\\([^()]{1,40}\\))?[:.)] .+|<dt\\b.*|[A-Z][A-Z .'-]{2,40}[.:]?|"
    "[^\\W\\d][\\w.' -]{1,40}[,(\\[]? ?\\(?\\d{1,2}[:.]\\d\\d(?:[:.]\\d\\d)?(?: ?[AaPp][Mm])?[)\\]]?:?|"
    "(?:INSERT|REPLACE|COPY|insert|copy)\\b.{1,200}(?:VALUES|values|stdin;)|<tr\\b.*<th\\b.*|"
    "[\\[(]?\\d[\\d/:., T-]{3,24}(?: ?[AaPp][Mm])?[\\])]? ?-? ?[^\\W\\d][\\w.' -]{1,40}:"
)
_FILE = re.compile("(?:[\\w.-]+[/\\\\])*+[\\w.-]+\\.\\w{1,8}")
_NUMBERED = re.compile("\\d+[:-]")
# The key that names a record, wherever in it it stands.
_NAME = re.compile("(?:- )?[\"']?(?:name|id|title|key|path|file|host)[\"']?\\s?[:=]\\s?[^\\s{\\[]")
_DEEPEST = 32
_TOP_KEY = re.compile("[\\w.-]{1,40}:(?:\\s|\\Z)")
# In Markdown, with a blank line above or below it. One sign is a comment as well, unless it parts other headings.
_HEADING = re.compile("#{2,6} \\S")
_TITLE = re.compile("#\\s+\\S.{0,80}\\Z")
_FIRST_HEADING = re.compile("# [^\\Wa-z].{0,80}(?<![.,;:])\\Z")
_COLON = re.compile("[:\uff1a][*_\"')]*(?:</\\w{1,10}>)*\\Z")
_FOLLOWING = re.compile("\\b(?:following|below)\\b")
_CODE = re.compile("[={};]|\\w\\((?!e?s\\))")
_DEFINITION = re.compile(":\\s")
_TOPIC = re.compile("\\d{1,3}[.)] \\S.{0,60}")
# What begins with a time goes on in the lines that are indented below it.
_STAMP = re.compile("[\\[(]?\\d{1,4}[-:/.]\\d\\d")
# A pair of a record, such as a header of a letter, and the most of one.
_PAIR = re.compile("\\*{0,2}([^\\W\\d][\\w ./()-]{0,40}+):\\*{0,2}\\s+\\S")
_MOST_PAIRS = 16


@dataclass(frozen=True)
class Unit:
    """Characters start…stop - 1 of a text. head: index of the unit that is kept with it, or -1. is_label: never kept
    but as a head: what begins a line, or (is_break) the break that ends it."""

    start: int
    stop: int
    head: int = -1
    is_label: bool = False
    is_break: bool = False


def cut_text(text: str, size: Size) -> list[Unit]:
    """The units of a text, in order and without gaps."""
    return _cut(*split_listings(text), size)


def _cut(text: str, lines: Sequence[Line], size: Size) -> list[Unit]:
    _find_changes(lines)
    _find_continued(lines, size)
    find_tables(lines, size)
    _find_records(lines)
    _find_keys(lines, find_regions(lines, size))
    _find_blocks(lines, size)
    _find_names(lines)
    _find_documents(lines)
    find_listings(lines)
    _leave_signs(lines)
    find_paragraphs(lines)
    units: list[Unit] = []
    unit_of = [0] * len(lines)
    at = 0
    while at < len(lines):
        last = last_line(lines, at)
        if last == at and lines[at].listing:
            own = _listed(text, lines[at], len(units), size)
        else:
            own = [*_units(text, lines[at], lines[last].stop, len(units), lines[at].last > at, size)]
        # A list needs the last sentence above it.
        head = len(units) + (len(own) - 1 - own[-1].is_break if lines[last].is_lead else 0)
        unit_of[at : last + 1] = [head] * (last + 1 - at)
        units += own
        at = last + 1
    return [_with_head(units, at, unit_of, size) for at in range(len(units))]


def _listed(text: str, line: Line, index: int, size: Size) -> list[Unit]:
    """The units of a listing, the first one of this index, with heads as `_units` has them. What it opens ends with
    it."""
    return [
        replace(unit, head=line.head if unit.head < 0 else -2 - index - unit.head)
        for unit in _cut(text, line.listing, size)
    ]


def _find_changes(lines: Sequence[Line]) -> None:
    """The lines of a change need its place, and that needs the line that names its file."""
    file = place = -1
    for at, line in enumerate(lines):
        is_outside, content = line.indent == 0, line.content
        following = lines[at + 1].content if at + 1 < len(lines) else ""
        is_named = is_outside and content.startswith("--- ") and following.startswith("+++ ")
        if is_outside and (content.startswith("diff -") or (is_named and (file < 0 or place >= 0))):
            file, place = at, -1
            if is_named and not following.endswith("/dev/null"):
                file = line.head = at + 1
        elif is_outside and file >= 0 and place < 0 and _OF_FILE.match(content):
            line.head = file if at != file else line.head
        elif _PLACE.match(content):
            place, line.head = at, file if file >= 0 else line.head
        elif place >= 0 and (line.indent or content[:1] in ("+", "-", "\\")):
            # Signs in the first column are no indentation.
            line.change = " " if line.indent else content[:1]
            line.margin = (line.indent or len(content) - len(content[1:].lstrip())) - 1
            line.head, line.indent = place, 0
        else:
            file = place = -1
        line.is_text = line.is_text and file == place == -1


def _find_continued(lines: Sequence[Line], size: Size) -> None:
    """A line that ends with a backslash goes on in the next."""
    for start, stop in runs(lines, lambda _, at: _goes_on(lines[at - 1].content)):
        if stop - start > 1 and size(lines[start].start, lines[stop - 1].stop) <= LONGEST_BLOCK:
            lines[start].last = stop - 1
        for line in lines[start + 1 : stop]:
            line.head = start if line.head < 0 else line.head


def _goes_on(content: str) -> bool:
    return content.endswith("\\") and not content.endswith(("\\\\", "|\\"))


def _find_records(lines: Sequence[Line]) -> None:
    """The pairs of a record need its first one; a record ends at a blank line, or where its first key comes again."""
    pairs = [
        _PAIR.match(line.content) if line.is_text and line.head < 0 and not line.indent else None for line in lines
    ]
    names = [pair[1] if pair else "" for pair in pairs]
    for start, stop in runs(lines, lambda start, at: bool(names[start] and names[at])):
        firsts = [at for at in range(start, stop) if names[at] == names[start]]
        records = list(pairwise([*firsts, stop]))
        # Turns of a conversation are sentences.
        is_said = 2 * sum(ends_sentence(line.content) for line in lines[start:stop]) > stop - start
        if not is_said and all(1 < len({*names[first:last]}) == last - first <= _MOST_PAIRS for first, last in records):
            for first, last in records:
                for line in lines[first + 1 : last]:
                    line.head = first


def _find_keys(lines: Sequence[Line], regions: Mapping[int, int]) -> None:
    """Lines need what they stand below: a key, a line that speaks of a list, a heading, the first line of a region."""
    keys: list[int] = []
    sections: list[tuple[int, int]] = []
    # What the open regions stand below, and their last lines.
    outer: list[tuple[list[int], list[tuple[int, int]], int]] = []
    # The key or caption over the lines up to the next blank one, and the last one of a known form.
    last_key = last_known = -1
    is_scope = is_ended = False
    for at, line in enumerate(lines):
        if outer and at == outer[-1][2]:
            (keys, sections, _), last_key = outer.pop(), -1
            continue
        is_body, is_scope = is_scope and line.content == "{", _is_scope(lines, at)
        is_inside = is_body or (at in regions and line.content[0] == "#")
        if not is_inside:
            _leave(lines, keys, line)
        if last_key >= 0 and line.indent < lines[last_key].indent:
            last_key = -1
        level = _level(lines, at, sections)
        while level and sections and sections[-1][0] >= level:
            sections.pop()
        section = sections[-1][1] if sections else -1
        is_key = _KEY.fullmatch(line.content) is not None
        following = lines[at + 1] if at + 1 < len(lines) else line
        is_caption = _is_caption(line, following)
        kinds = set[str]()
        if last_key >= 0 and not (is_key or is_caption or level or is_scope or at in regions):
            kinds = _shared_kinds(lines[last_key], line)
        if _DEFINITION.match(line.content) and at and line.head < 0 and not lines[at - 1].is_before_blank:
            line.head = lines[at - 1].head if _DEFINITION.match(lines[at - 1].content) else at - 1
        if line.head < 0:
            follows_key = last_key >= 0 and not (is_ended or is_key or is_caption or kinds)
            line.head = section if level else keys[-1] if keys else last_key if follows_key else section
        if at in regions:
            lines[regions[at]].head, line.head = line.head, regions[at]
            outer.append((keys, sections, regions[at]))
            keys, sections, last_key = [], [(0, at)], -1
        elif level:
            sections.append((level, at))
            last_key = -1
            if line.content.startswith("[[") and _NAME.match(following.content):
                line.last = at + 1
        elif is_scope:
            keys.append(at)
        elif is_key or is_caption or kinds:
            keys += [at] if is_key or kinds & {":", "["} else []
            if kinds == {"A"} and line.head < 0 and not is_ended:
                # In capitals it may be a name, or an item of the last known one.
                line.head = last_known
            elif kinds:
                # Notes what it speaks of.
                _is_lead(line, following)
            last_key, last_known, is_ended = at, last_known if kinds else at, False
        elif _is_lead(line, following):
            keys.append(at)
            is_free = following.head < 0 and not (line.is_before_blank or _is_sibling(line, following))
            if is_free and not _level(lines, at + 1, sections):
                following.head = at
        elif following.indent > line.indent and line.is_text and line.last == at:
            # A record's first line, or an item's, over the others.
            if _UNNAMED.fullmatch(line.content) and not _opens(following.content) and not is_body:
                line.last = at + 1
                keys.append(at)
            elif _goes_on_below(line, following):
                keys.append(at)
        is_closed = line.content.startswith((")", "]", "}")) and not _opens(line.content)
        is_ended |= is_closed and last_key >= 0 and line.indent == lines[last_key].indent
        if line.is_before_blank:
            last_key = -1
        if _END_OF_SECTION.fullmatch(line.content):
            sections = [each for each in sections if not each[0]]


def _level(lines: Sequence[Line], at: int, sections: Sequence[tuple[int, int]]) -> int:
    """How deep the section is that a line names, the outermost 1; 0 for another line."""
    line, content = lines[at], lines[at].content
    above = lines[sections[-1][1]] if sections and sections[-1][0] else None
    if level := _heading(lines, at, sections, above) or _underlined(lines, at):
        return level
    if above and above.content[0] == "[" and above.indent == line.indent and _BRACKETS.fullmatch(content):
        return 7
    section = _SECTION.fullmatch(content)
    if section is None:
        is_branch = sections and not sections[0][0] and lines[sections[0][1]].content[:1] == "#" and ELSE.match(content)
        return int(bool(is_branch))
    if section[1]:
        return int(section[1][1])
    if content[0] == "\\":
        return 1 + content.count("sub") + content.startswith("\\section")
    return 1 if _STARTS_ANEW.match(content) else 7


def _heading(lines: Sequence[Line], at: int, sections: Sequence[tuple[int, int]], above: Line | None) -> int:
    """The depth of a heading with "#"; 0 for another line. above: the heading of the section that it stands in."""
    line, content = lines[at], lines[at].content
    if not (line.is_text and content.startswith("#")):
        return 0
    # Below a heading of Markdown one sign is no comment.
    is_below = above is not None and sections[0][0] > 0 and above.content.startswith("#")
    is_heading = bool(_HEADING.match(content) or (is_below and _TITLE.match(content)))
    if line.is_before_blank:
        is_heading = is_heading or bool(_FIRST_HEADING.match(content) and sections and sections[0][0])
    elif is_heading:
        following = lines[at + 1].content if at + 1 < len(lines) else ""
        is_first = not at or lines[at - 1].is_before_blank or (is_below and at == sections[-1][1] + 1)
        is_over_deeper = _HEADING.match(following) is not None and _depth(following) > _depth(content)
        is_heading = is_first and following != "" and (following[0] != "#" or is_over_deeper)
    return _depth(content) if is_heading else 0


def _underlined(lines: Sequence[Line], at: int) -> int:
    """The depth of a heading over a rule, which becomes part of it; 0 for another line."""
    line, content = lines[at], lines[at].content
    is_first = not at or lines[at - 1].is_before_blank
    if at + 1 == len(lines) or not (line.is_text and is_first) or line.indent or line.is_before_blank:
        return 0
    rule = lines[at + 1].content
    # A short rule has the length of what it is below.
    fits = (len(rule) > 3 and len(content) <= len(rule) + 2) or (len(rule) == len(content) and content.isalnum())
    if not fits or not _UNDERLINE.fullmatch(rule) or RULE.fullmatch(content):
        return 0
    line.last = at + 1
    return "=-".find(rule[0]) + 1 or len("=-") + 1


def _depth(heading: str) -> int:
    return len(heading) - len(heading.lstrip("#"))


def _is_lead(line: Line, following: Line) -> bool:
    """Whether a line speaks of the list or the line that follows."""
    content = line.content
    is_above = following is not line and following.indent >= line.indent
    if not (line.is_text and is_above) or len(content) > _LONGEST_CAPTION or _STAMP.match(content):
        return False
    is_over_item = ITEM.match(following.content) is not None and not ITEM.match(content)
    if _COLON.search(content) and not content.startswith(("#", "//", "/*", "* ", "--", ")", "]", "}")):
        line.is_lead = (
            following.content.startswith(">")
            or content[0] == "<"
            or not (content[0].islower() or _CODE.search(content))
        )
    else:
        is_open = not line.is_before_blank and not ends_sentence(content) and content[0] not in "<[{("
        line.is_lead = is_over_item and line.is_prose and (is_open or _FOLLOWING.search(content) is not None)
    return line.is_lead


def _goes_on_below(line: Line, following: Line) -> bool:
    """Whether lines that are indented below a line go on with it: of an item, a clause or a log."""
    content = line.content
    if _STAMP.match(content) or following.content.startswith("at "):
        return True
    if ends_sentence(content):
        return False
    is_item = ITEM.match(following.content) is not None
    is_clause = (
        content[0].isalnum()
        and not content[0].islower()
        and " " in content
        and not _CODE.search(content)
        and (not line.is_before_blank or is_item)
    )
    return ITEM.match(content) is not None or (is_clause and (is_item or following.is_prose))


def _leave(lines: Sequence[Line], keys: list[int], line: Line) -> None:
    """Take away the keys that a line does not stand below; an item leaves its siblings, and what is below them."""
    while keys and not _is_below(lines[keys[-1]], line):
        keys.pop()
    # Of equal indent there are as many keys as signs at most.
    for at in range(len(keys) - 1, -1, -1):
        if lines[keys[at]].indent < line.indent:
            break
        if _is_sibling(lines[keys[at]], line):
            del keys[at:]
            break


def _is_below(key: Line, line: Line) -> bool:
    """Whether a line belongs to a key by its indentation; items of a list need none."""
    is_over = key.is_lead or (key.content.endswith(":") and not key.content.startswith("- "))
    is_listed = line.indent == key.indent and is_over and ITEM.match(line.content) is not None
    return line.indent > key.indent or is_listed


def _is_sibling(item: Line, other: Line) -> bool:
    """Whether two lines are items of one list."""
    return item.indent == other.indent and _sign(item.content) == _sign(other.content) != ""


def _sign(content: str) -> str:
    """What an item begins with, the same for all items of a list; empty for another line."""
    found = ITEM.match(content)
    sign = found[0].strip() if found and found[0][0] not in "|`~<\\" else ""
    number = sign.strip("().")
    return (
        sign.replace(number, "1" if number.isdigit() else "a" if number.islower() else "A")
        if number.isalnum()
        else sign
    )


def _shared_kinds(key: Line, line: Line) -> set[str]:
    """The kinds of key that two lines of the same indentation share: the later one ends the earlier one's block."""
    return _kinds_of(key.content) & _kinds_of(line.content) if key.indent == line.indent else set()


def _kinds_of(content: str) -> set[str]:
    """The kinds of key that a line may be, in whatever form: ":" and "[" by what it ends with, "A" of a name in
    capitals, the form of a time, the sign of a number."""
    kinds = set[str]()
    if len(content) <= _LONGEST_CAPTION:
        opener = _OPENER.search(content)
        if opener and content[0] not in ")]}":
            is_block = opener[0][0] in "[{("
            kinds.update("[" if is_block else () if _CODE.search(content) or _STATEMENT.match(content) else ":")
        is_plain = content[:1].isalpha() and content[-1] not in "!?," and ":" not in content[:-1]
        if is_plain and content.partition("(")[0].isupper() and not _CODE.search(content):
            kinds.add("A")
        kinds.update("0".join(re.split("[\\dAPap]+", time[0])) for time in _TIME.finditer(content))
        kinds.update({_sign(content)} if content[:1] in "(0123456789" else ())
    return kinds - {""}


def _is_caption(line: Line, following: Line) -> bool:
    if not line.is_text or line.is_before_blank or len(line.content) > _LONGEST_CAPTION:
        return False
    # "1. Budget" over what was said of it
    is_topic = _TOPIC.fullmatch(line.content) and not ITEM.match(following.content)
    is_asked = line.content.endswith("?") and not label_end(following.content)
    is_topic = is_topic and (is_asked or not ends_sentence(line.content))
    is_topic = is_topic and following.indent == line.indent and not following.content[:1].islower()
    is_file = _FILE.fullmatch(line.content) and _NUMBERED.match(following.content)
    return bool(is_file or is_topic or _CAPTION.fullmatch(line.content))


def _is_scope(lines: Sequence[Line], at: int) -> bool:
    """Whether a line names a scope of code and lines are indented below it, maybe behind a bracket on a line alone."""
    line = lines[at]
    below = next((each for each in lines[at + 1 : at + 3] if each.content != "{"), line)
    is_braced = below is not line and lines[at + 1] is not below
    return below.indent > line.indent and _SCOPE.match(line.content + " {" * is_braced) is not None


def _opens(content: str) -> bool:
    return content.endswith(OPENERS) or _UNNAMED.fullmatch(content) is not None


def _find_blocks(lines: Sequence[Line], size: Size) -> None:
    """Join short blocks: a line, those that are indented below it, and the bracket or tag that closes them."""
    ends = list(range(len(lines)))
    # From the right, lines of which each is indented less than the one before it.
    outer: list[int] = []
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        while outer and lines[outer[-1]].indent > line.indent:
            outer.pop()
        following = outer[-1] if outer else len(lines)
        sibling = lines[following].content if outer and lines[following].indent == line.indent else ""
        is_quoted = following > at + 1 and lines[at + 1].content[:1] == ">" != line.content[:1] and not line.is_lead
        is_open = not (line.listing or is_quoted or (line.is_prose and ends_sentence(line.content)))
        if following > at + 1 and is_open:
            is_closed = _CLOSER.match(sibling) is not None
            ends[at] = following if is_closed else following - 1
            # "} else {"
            if is_closed and sibling.endswith(OPENERS):
                ends[at] = ends[following]
        elif line.content.startswith("@") and outer and (sibling.startswith("@") or _is_scope(lines, following)):
            # Decorators stay with what they are of.
            ends[at], line.last = ends[following], max(lines[following].last, following)
        elif following == at + 1 and sibling in OPENERS and not line.content.endswith((",", ";", "}")):
            ends[at] = ends[following]
        outer.append(at)
    at = 0
    while at < len(lines):
        line = lines[at]
        is_record = _UNNAMED.fullmatch(line.content) is not None or line.content.startswith("- ")
        most = LONGEST_RECORD if is_record else LONGEST_BLOCK
        end = max(ends[at], lines[ends[at]].last)
        if end > line.last and size(line.start, lines[end].stop) <= most:
            line.last = end
        at = line.last + 1


def _find_names(lines: Sequence[Line]) -> None:
    """The lines of a record of several units need the line that names it."""
    # Records that are not over, each with the line that names it or -1.
    records: list[list[int]] = []
    for at, line in enumerate(lines):
        while records and lines[records[-1][0]].indent >= line.indent:
            _tell(lines, *records.pop())
        is_name = _NAME.match(line.content) is not None
        for record in records if is_name else ():
            if record[1] < 0 or lines[record[1]].indent > line.indent:
                record[1] = at
        if line.content.startswith("- ") or _UNNAMED.fullmatch(line.content):
            records.append([at, at if is_name else -1])
    for record in reversed(records):
        _tell(lines, *record)


def _find_documents(lines: Sequence[Line]) -> None:
    """The blocks of a document in a stream of YAML need the line that names it."""
    documents = [0, *(at + 1 for at, line in enumerate(lines) if line.content == "---"), len(lines)]
    for start, stop in pairwise(documents) if len(documents) > 2 else ():
        names = [at for at in range(start, stop) if _NAME.match(lines[at].content)]
        if not names:
            continue
        name = min(names, key=lambda at: lines[at].indent)
        top = _top(lines, name)
        for at in range(start, stop):
            if lines[at].head < 0 and at != top and _TOP_KEY.match(lines[at].content):
                lines[at].head = name


def _leave_signs(lines: Sequence[Line]) -> None:
    """The lines of a change are read without their signs; no sentence goes over lines with different ones."""
    for line, following in pairwise(lines):
        line.is_before_blank |= line.change != following.change
    for at, line in enumerate(lines):
        if line.change:
            line.indent, line.is_inside = line.margin, True
            line.content = line.content if line.change == " " else line.content[1:].lstrip()
            if not line.content:
                line.is_before_blank = lines[at - 1].is_before_blank = True


def _tell(lines: Sequence[Line], record: int, name: int) -> None:
    """Let a record's first line need the line that names it, and that what the first line needed."""
    top = _top(lines, name, record)
    if name > lines[record].last and lines[top].head == record:
        lines[top].head, lines[record].head = lines[record].head, name


def _top(lines: Sequence[Line], at: int, below: int = -1) -> int:
    """The last of the heads that a line needs, up to one that needs a certain line."""
    for _ in range(_DEEPEST):
        if lines[at].head in (-1, below):
            break
        at = lines[at].head
    return at


def _units(text: str, line: Line, stop: int, index: int, is_block: bool, size: Size) -> Iterator[Unit]:
    """The units of a line, or of the block or paragraph that it begins, the first one of this index. A head is a line's
    index, or -2 less a unit's."""
    start, head, content = line.start, line.head, text[line.start : stop].rstrip()
    end = start + len(content)
    # A comment is cut into sentences if it is longer than a unit.
    is_plain = line.is_text and not line.sign
    is_text = line.is_prose or (line.is_wording and (is_plain or size(start, stop) > LONGEST_UNIT))
    ends = [start + at for at in sentence_ends(content)] if is_text and not is_block else []
    label_stop = content.index(line.sign) + len(line.sign) if line.sign else label_end(content)
    if not label_stop:
        label_stop = len(content) - len(content.lstrip()) if line.is_numbered else len(line.change)
    label = start + label_stop if ends and label_stop < ends[0] - start else start
    spans = pairwise([label, *ends, end if ends else stop])
    parts = [part for span in spans for part in cut_long(text, *span, size, LONGEST_UNIT)]
    if len(parts) > 1:
        # All parts of a line need the break that ends it.
        parts[-1] = (parts[-1][0], end)
        if end < stop:
            head, break_head = -2 - index - len(parts) - (label > start), head
    if label > start:
        yield Unit(start, label, head, is_label=True)
        head = -2 - index
    for part in parts:
        yield Unit(*part, head)
    if len(parts) > 1 and end < stop:
        yield Unit(end, stop, break_head, is_label=True, is_break=True)


def _with_head(units: Sequence[Unit], at: int, unit_of: Sequence[int], size: Size) -> Unit:
    """A unit with the index of its head's unit. See `_units`."""
    unit = units[at]
    head = -1 if unit.head == -1 else unit_of[unit.head] if unit.head >= 0 else -2 - unit.head
    is_none = head in (-1, at) or size(units[head].start, units[head].stop) > LONGEST_HEAD
    return replace(unit, head=-1 if is_none else head)
