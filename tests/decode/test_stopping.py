from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_stack.decode.stopping import StopChecker, TextStream

ALPHABET = "abcde"


def letters(token_ids: list[int]) -> str:
    return "".join(ALPHABET[token_id] for token_id in token_ids)


def run(stopper: StopChecker, steps: list[list[int]]) -> tuple[list[int], str, str | None]:
    tokens, text, reason = [], "", None
    for step in steps:
        kept, piece, reason = stopper.cut(step)
        tokens, text = tokens + kept, text + piece
        if reason is not None:
            break
    return tokens, text, reason


steps_of_tokens = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=8)


@given(steps_of_tokens, st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_alike_however_the_tokens_are_stepped(steps: list[list[int]], stop: list[str]) -> None:
    flat = [token for step in steps for token in step]
    whole = letters(flat)
    stepped = run(StopChecker(len(flat), (), stop, TextStream(letters)), steps)
    single = run(StopChecker(len(flat), (), stop, TextStream(letters)), [[token] for token in flat])
    assert stepped == single
    cut = min((whole.find(text) for text in stop if text in whole), default=None)
    tokens, text, reason = stepped
    if cut is None:
        assert (tokens, text, reason) == (flat, whole, "length")
    else:
        assert reason == "stop"
        ends = min(whole.find(text) + len(text) for text in stop if text in whole)
        assert len(tokens) == ends
        first = min(whole[:ends].find(text) for text in stop if text in whole[:ends])
        assert text == whole[:first]


@settings(max_examples=40)
@given(steps_of_tokens, st.integers(1, 12), st.sets(st.integers(0, 4), max_size=2))
def test_max_tokens_and_end_tokens_cut_inside_a_step(steps: list[list[int]], limit: int, end_ids: set[int]) -> None:
    flat = [token for step in steps for token in step]
    end = next((index + 1 for index, token in enumerate(flat) if token in end_ids), len(flat) + 1)
    tokens, text, reason = run(StopChecker(limit, end_ids, (), TextStream(letters)), steps)
    expected = flat[: min(end, limit)]
    assert tokens == expected
    assert text == letters(expected[:-1] if end <= min(limit, len(flat)) else expected)
    if end <= limit and end <= len(flat):
        assert reason == "eos"
    elif limit <= len(flat):
        assert reason == "length"
    else:
        assert reason is None


def test_text_that_could_become_a_stop_string_is_held_back() -> None:
    stopper = StopChecker(9, (), ["cde"], TextStream(letters))
    assert [stopper.cut([token])[1] for token in (0, 2, 3)] == ["a", "", ""]
    assert stopper.cut([1])[1] == "cdb"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        StopChecker(5, (), ["x"])


def test_the_earliest_start_of_stop_strings_that_end_together_cuts() -> None:
    assert StopChecker(9, (), ["bcd", "d"], TextStream(letters)).cut([0, 1, 2, 3, 4]) == ([0, 1, 2, 3], "a", "stop")
