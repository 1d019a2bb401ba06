"""Sentences: where they end, in which lines they are looked for, and what of a line they all need. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Stops that end a sentence before a blank, and those that end one anywhere: CJK, Arabic, Urdu, Hindi, Armenian,
# Ethiopic, Burmese, Khmer.
_STOPS = ".!?\u2026"
_WIDE_STOPS = "\u3002\uff01\uff1f\uff61\u061f\u06d4\u0964\u0965\u0589\u1362\u1367\u104a\u104b\u17d4\u17d5"
_CLOSERS = "\"'`*_)\\]}\u2019\u201d\u00bb\u300d\u300f\uff09"
# Text in quotes or brackets is not cut, up to so many characters.
_LONGEST_QUOTE = 300
_QUOTES = "|".join(
    f"{opens}[^{shut}]{{1,{_LONGEST_QUOTE}}}+{closes}"
    for opens, closes, shut in (
        ('(?<!\\w)"', '"', '"'),
        ("\u201c", "\u201d", "\u201c\u201d"),
        ("\u00ab", "\u00bb", "\u00ab\u00bb"),
        ("\u300c", "\u300d", "\u300c\u300d"),
        ("\\(", "\\)", "()"),
        ("\\[", "\\]", "\\[\\]"),
        ("\\{", "\\}", "{}"),
    )
)
# A run of stops is read once, from its first: otherwise one that ends nothing would take quadratic time.
_MARKS = re.compile(
    f"(?:{_QUOTES}|(?<![{_STOPS}])[{_STOPS}]++)[{_STOPS}{_WIDE_STOPS}{_CLOSERS}]*+|[{_WIDE_STOPS}]"
    f"[{_STOPS}{_WIDE_STOPS}{_CLOSERS}]*+"
)
_ENDS_WITH_STOP = re.compile(f"[{_STOPS}{_WIDE_STOPS}][{_STOPS}{_WIDE_STOPS}{_CLOSERS}]*+\\Z")
# Scripts without spaces need no blank behind a stop.
_WITHOUT_SPACES = re.compile("[\u2010-\u2027\u2030-\u206f\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]")
_WORD_BEFORE = re.compile("[^\\s(\\[{\"'\u201c\u2018\u00ab]*\\Z")
_INITIALS = re.compile("(?:[^\\W\\d_]\\.)*[^\\W\\d_]")
_NUMBER = re.compile("\\(?(?:\\d{1,3}|[ivxlcIVXLC]{1,5})")
_ABBREVIATION = re.compile(
    "mr|mrs|ms|mx|dr|prof|rev|hon|st|sr|jr|messrs|mme|mlle|mm|sra|srta|hr|fr|gen|col|capt|cpt|lt|sgt|maj|cmdr|gov|sen|"
    "rep|pres|supt|inc|ltd|co|corp|llc|bros|dept|univ|assn|est|vs|viz|cf|etc|al|ie|eg|ca|bzw|usw|evtl|ggf|inkl|vgl|"
    "approx|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|mon|tues?|wed|thu|thurs?|fri|ave|blvd|rd|mt|ft"
)
# Only where a number follows.
_BEFORE_NUMBER = re.compile("\\w*str|tel|nos?|nr|figs?|eqs?|sec|art|vol|ch|pp?|pt|para|tab|abs|bd|num")
# "am 3. Oktober": numbers in order, behind German articles and prepositions.
_ORDINAL = re.compile("\\b(?:am|vom|zum|der|die|das|dem|den|des|im)\\s+\\d{1,3}\\Z", re.IGNORECASE)
_TEMPLATE = re.compile("<\\|[^\\s<>]{1,40}+>|</?s>|</?\\w{1,20}_of_\\w{1,20}>")
# What tells that a line is code, a row, a log's or a listing's line, once its quotes and brackets are left out.
_NO_PROSE = re.compile(
    "[=<>{}|\\\\\\t]|\\w\\((?!e?s\\))|;\\s*\\Z|\\d:\\d\\d:\\d\\d|\\A\\s*(?:#|//|--|/\\*|%|;|@|\\$|[\\[\\d])|\\A\\s*\\S+:\\d+:"
)
# Code among words: in backticks, a call, an option, a variable, a tag, a time, an escape, an operator, an address.
_INLINE_CODE = re.compile(
    "`[^`]{1,120}`|(?<![\\w.:>-])\\w[\\w.:>-]{0,80}+\\(\\)|(?<!\\S)(?:--?|[$@])?[\\w.-]{1,80}=\\S{0,80}|(?<!\\S)(?:--?|[$@])\\w\\S{0,80}|"
    "</?\\w[^<>]{0,80}>|\\b\\d{1,2}:\\d\\d:\\d\\d\\b|\\\\\\w{1,20}|\\{\\}|"
    "(?<=\\s)(?:[=!<>]=|[<>|]|[-=]>)(?=\\s)|(?<!\\S)\\$[^$\\s][^$]{0,60}\\$|https?://\\S{1,200}"
)
_STARTS_WITH_CODE = re.compile("[`<$]\\w|--?\\w")
# Code seldom ends with a stop.
_WORDS_OF_STOP = 3
_WORD = re.compile("(?<!\\S)[^\\W\\d_][^\\W\\d_'’-]*[,;:.!?]?(?!\\S)")
_LISTED = "(?:(?:[-*+\u2022\u00b7]|>{1,8}|\\[[^\\[\\]\\n]{1,40}\\])[^\\S\\n]+|\\(?\\d{1,3}[.)][^\\S\\n]+)"
_NAMED = "\\*{0,2}(?:[^\\W\\d][\\w.-]*|[A-Z][\\w.'-]*(?: [A-Z0-9][\\w.'-]*){1,3})\\*{0,2}:\\*{0,2}(?=\\s)"
_LABEL = re.compile(f"\\s*{_LISTED}{{0,4}}(?:{_NAMED})?")
# Last words of a line that the next one goes on with, and how long the line is at least.
_OPEN_END = re.compile(
    "(?:[,\u2013\u2014-]|\\b(?:a|an|the|of|in|on|at|to|for|from|with|by|and|or|but|is|are|was|were|be|been|has|have|had|"
    "that|which|who|than|as|his|her|its|their|my|your|our|not|no|never|only|if|unless|except|without))\\Z"
)
SHORTEST_WRAPPED = 40
_LETTER = re.compile("[^\\W\\d_]")
_QUOTATION_MARKS = ("`", "(", '"', "'", "\u201c", "\u2018", "\u00ab")
_QUOTATION = re.compile("(?:>\\s?)++")


def is_prose(line: str) -> bool:
    """Whether sentences of a line may be kept alone; of code, tables, logs and listings they may not."""
    text = _TEMPLATE.sub("", line)
    return _NO_PROSE.search(_MARKS.sub(_without_quotes, text[label_end(text) :])) is None


def words_with_code(line: str) -> int:
    """How many words a line has that is prose but for code among them, a stop as some; 0 for another line."""
    words = _INLINE_CODE.sub(" ", line)
    is_words = words != line and is_prose(words)
    return (
        len(_WORD.findall(_MARKS.sub(_without_quotes, words))) + _WORDS_OF_STOP * ends_sentence(line) if is_words else 0
    )


def _without_quotes(match: re.Match[str]) -> str:
    return "" if match[0][0] in '"\u201c\u00ab\u300c([{' else match[0]


def label_end(line: str) -> int:
    """Where a line's bullet, number, quotation sign and name of a speaker or key end; 0 without."""
    match = _LABEL.match(line)
    return len(match[0].rstrip()) if match and match[0].strip() else 0


def sentence_ends(text: str) -> Iterator[int]:
    """Where the sentences of prose end, behind their stops and what closes them; not the end of the text."""
    start = 0
    for match in _MARKS.finditer(text):
        if match.end() < len(text) and _is_end(text, start, match):
            yield (start := match.end())


def continues(line: str, following: str) -> bool:
    """Whether a line of prose is broken inside of a sentence, which the following line goes on with."""
    line, following = line.rstrip(), following.strip()
    quotation = _QUOTATION.match(following)
    if quotation and line.startswith(quotation[0].strip()):
        following = following[quotation.end() :].lstrip()
    first, is_short = following[:1], len(line.strip()) < SHORTEST_WRAPPED
    if ends_sentence(line):
        return not is_short and not any(
            _is_end(line + " A", 0, match) for match in _MARKS.finditer(line) if match.end() == len(line)
        )
    if not is_short:
        return (
            first.islower()
            or (first.isdigit() and not line.lstrip()[0].isdigit())
            or (_STARTS_WITH_CODE.match(following) is not None and line.lstrip()[0] != first)
            or _OPEN_END.search(line) is not None
        )
    return not label_end(f"{following} ") and line[-1] not in ":\uff1a" and _is_broken(line, following)


def _is_broken(line: str, following: str) -> bool:
    """Whether a short line without a stop goes on; the words of a list do not."""
    letter = _LETTER.search(line)
    opening, first = letter[0] if letter else "", following[:1]
    if first.islower():
        return opening.isupper() or (line[-1].isalpha() and _OPEN_END.search(line) is not None)
    if first.isupper() or first.isdigit() or first in _QUOTATION_MARKS:
        return line[-1].isalpha() and _OPEN_END.search(line) is not None
    # Scripts without capitals
    return opening.isalpha() and not opening.isupper() and not opening.islower() and ends_sentence(following)


def ends_sentence(line: str) -> bool:
    """Whether a line ends with a stop."""
    return _ENDS_WITH_STOP.search(line[-20:].rstrip()) is not None


def _is_blank(text: str, start: int, stop: int) -> bool:
    return not text[max(start, stop - 40) : stop].strip()


def _is_end(text: str, start: int, match: re.Match[str]) -> bool:
    stop = _ENDS_WITH_STOP.search(match[0], max(0, len(match[0]) - 20))
    if stop is None:
        return False
    following = text[match.end() : match.end() + 40]
    if any(sign in _WIDE_STOPS for sign in stop[0]):
        # What was said, and that it was
        return not (stop[0][-1] in "\u300d\u300f\u201d" and following[:1] in ("\u3068", "\u3063"))
    if not following[:1].isspace():
        return _WITHOUT_SPACES.match(following) is not None
    first = following.lstrip()[:1]
    if first.islower() or first in ",;:)]}/&|" or (match[0][0] in _STOPS and _is_blank(text, start, match.start())):
        return False
    if stop[0].rstrip(_CLOSERS) != ".":
        return True
    at = match.start() + stop.start()
    word = _WORD_BEFORE.search(text, max(start, at - 40), at)
    before = word[0] if word else ""
    return not (
        _ABBREVIATION.fullmatch(before.lower().replace(".", ""))
        or (first.isdigit() and _BEFORE_NUMBER.fullmatch(before.lower()))
        or _INITIALS.fullmatch(before)
        or (before.isdigit() and _ORDINAL.search(text, max(start, at - 12), at))
        # What precedes a number is read last: the sentence ends there, unless it begins there.
        or (_NUMBER.fullmatch(before) and not text[start : at - len(before)].strip())
    )
