"""Expressions over users' text take linear time, whatever runs of characters the text has."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest
import torch

from spec_stack import PrefillConfig
from spec_stack.api.pruned_text import write_spans
from spec_stack.hf.answer_parser import AnswerFormat, AnswerParser, ToolFormat, parse_answer
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates
from spec_stack.prefill.question import shared_rare_words
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments, line_borders, make_segments
from spec_stack.prefill.sentences import sentence_ends

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
    *("> a\n", "a\n---\n", "am 3. ", "A. ", "ii. ", "1:\n", "1\u2192\n"),
    # Lines that need each other.
    *("A, b:\n", "1. A, b:\n c\n"),
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
    shared_rare_words(ScoringInputs(prompt_of(text)), segments_of(text))


def choose(text: str) -> None:
    segments = segments_of(text)
    segments.chosen(torch.arange(len(segments)), PrefillConfig(), 0.2)


def segments_of(text: str) -> Segments:
    pieces = pieces_of(text)
    return make_segments(len(pieces), pieces, PrefillConfig())


CALLERS: dict[str, Callable[[str], object]] = {
    "borders": lambda text: line_borders(pieces_of(text)),
    "queries": lambda text: find_candidates(prompt_of(text)),
    "words": find_words,
    "selection": choose,
    "answers": lambda text: parse_answer(AnswerParser(TOOLS, ["f"]), text),
}


def seconds(caller: Callable[[str], object], text: str) -> float:
    began = process_time()
    caller(text)
    return process_time() - began


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
    assert seconds(CALLERS[caller], text) < ANYWAY + SECONDS * size / MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize("run", ["A. ", "Mr. A ", "am 3. "])
def test_stops_that_end_no_sentence_take_linear_time(run: str) -> None:
    def read(text: str) -> None:
        assert len([*sentence_ends(text)]) <= 1

    short, long = (seconds(read, run * (size // len(run))) for size in (10**5, 8 * 10**5))
    # Eight times as long; a look back over the sentence at every stop took 29 times as long.
    assert long < 16 * short + 0.1


@pytest.mark.parametrize("caller", ["words", "selection"])
def test_lines_of_any_depth_take_linear_time(caller: str) -> None:
    # All heads of every line took 9 seconds.
    assert seconds(CALLERS[caller], "#if 0\n" * 800 + "x = 1\n" + "#endif\n" * 800) < ANYWAY
