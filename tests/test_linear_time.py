"""Expressions over users' text take linear time, whatever runs of characters the text has."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest

from spec_stack.api.pruned_text import write_spans
from spec_stack.hf.answer_parser import AnswerFormat, AnswerParser, ToolFormat, parse_answer
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates
from spec_stack.prefill.question import shared_rare_words
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments, line_borders

# Runs behind which an expression may have to go back: stops, closers, blanks, breaks, brackets, quotes, marks.
RUNS = [
    *".!?。！？।۔…\"'`*_)]}([{<>|,;:#/\\-=~ \t\n\r0a雨กक\u200d\u0301\u0430👍",
    *(
        ". ",
        ".)",
        '."',
        "?!",
        "..a",
        ".\n",
        "\r\n",
        "  \n",
        '\\"',
        "a.b",
        "e.g. ",
        "1.",
        "1, ",
        "[{",
        '{"a":',
        "| ",
        "#\n",
    ),
    *("\n|", " |\n", "//", "/*", "```\n", "- ", "\n\n", "👍🏽", "\u0915\u094d"),
    *("<tool_call>", '<tool_call>"', "</tool_call>", "<dt>", "<!--\n", "<<EOF\n", "#if 0\n"),
    *("---\n", "- a:\n", "{\n", "name: a\n", ',"', ',"\n', "== ", "=>", "Q: a?\n", "a/", "a.", "&\\\\\n", "A b:\n"),
    *("> a\n", "a\n---\n", "am 3. "),
]
# The processor time of 1 MB at most, and what anything may take: what goes back over a run takes minutes at 64 KB.
SECONDS, ANYWAY = 60.0, 1.0
MEGABYTE = 2**20
SIZES = [pytest.param(2**16, id="64 KB"), pytest.param(MEGABYTE, id="1 MB", marks=pytest.mark.nightly)]

TOOLS = AnswerFormat(ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), thinks=True)


def pieces_of(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def prompt_of(text: str) -> PromptText:
    pieces = pieces_of(text)
    return PromptText(range(len(pieces)), pieces)


def find_words(text: str) -> None:
    shared_rare_words(ScoringInputs(prompt_of(text)), Segments(line_borders(pieces_of(text))))


CALLERS: dict[str, Callable[[str], object]] = {
    "borders": lambda text: line_borders(pieces_of(text)),
    "queries": lambda text: find_candidates(prompt_of(text)),
    "words": find_words,
    "answers": lambda text: parse_answer(AnswerParser(TOOLS, ["f"]), text),
}


@pytest.mark.slow
@pytest.mark.parametrize("line", ["ab\n", "ab, "])
def test_a_text_of_many_gaps_is_written_in_linear_time(line: str) -> None:
    text = line * (MEGABYTE // len(line))
    began = process_time()
    written = write_spans(text, [(at, at + len(line)) for at in range(0, len(text), 2 * len(line))], None)
    assert process_time() - began < SECONDS / 10
    assert len(written) > MEGABYTE / 2


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("run", RUNS, ids=ascii)
def test_a_run_of_any_character_takes_linear_time(caller: str, run: str, size: int) -> None:
    text = "Tests: " + run * (size // len(run)) + "ok\nThe end."
    began = process_time()
    CALLERS[caller](text)
    assert process_time() - began < ANYWAY + SECONDS * size / MEGABYTE
