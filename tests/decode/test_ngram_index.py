"""The suffix automaton and the memory of texts, against comparing every place."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from itertools import islice
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.controller.lookup import Found
from spec_stack.decode.lookup_index import LookupIndex, TextMemory
from spec_stack.decode.suffixes import START, SuffixAutomaton
from tests.support.models import random_prompt
from tests.support.reference_lookup import longest_followed

texts = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4)


def taken_in(several: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in several:
        automaton.begin_text()
        automaton.extend(text)
    return automaton


@given(several=texts, tail=st.lists(st.integers(0, 3), max_size=5))
def test_the_longest_end_that_anything_followed_is_found_with_what_followed_it_most_often(
    several: list[list[int]], tail: list[int]
) -> None:
    automaton = taken_in(several)
    place = automaton.place
    for token_id in tail:
        place = automaton.follow(place, token_id)
    found = automaton.next(place)
    expected = longest_followed(several, [*several[-1], *tail])
    assert (found and found[:4]) == (expected and (expected[1], expected[0], *expected[2:]))


@given(several=texts, other=st.lists(st.integers(0, 3), max_size=10), later=texts)
def test_a_text_that_is_only_followed_finds_the_same_also_after_more_was_taken_in(
    several: list[list[int]], other: list[int], later: list[list[int]]
) -> None:
    automaton = taken_in(several)
    place = START
    for token_id in other:
        place = automaton.follow(place, token_id)
    for text in later:
        automaton.begin_text()
        automaton.extend(text)
    found = automaton.next(place)
    if found is not None:
        # What came later can make another end longer; the one that stood here before is judged by all texts.
        end = other[len(other) - found.length :]
        expected = longest_followed([*several, *later], end)
        assert expected is not None
        assert found[:4] == (expected[1], expected[0], *expected[2:])


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_it_has_at_most_two_states_for_every_token(text: list[int]) -> None:
    assert taken_in([text]).num_states <= 2 * len(text) + 1


def ids(found: Iterator[Found], num_tokens: int) -> list[int]:
    return [each.token_id for each in islice(found, num_tokens)]


def test_a_continuation_goes_on_past_the_end_of_the_text_with_itself() -> None:
    index = LookupIndex()
    index.extend([9, 4, 5, 6, 4, 5, 6, 4])
    assert ids(index.continuations()[0], 7) == [5, 6, 4, 5, 6, 4, 5]
    assert ids(index.continuations((5,))[0], 4) == [6, 4, 5, 6]
    assert ids(index.continuations((), {6})[0], 4) == [5, 6]
    assert ids(index.continuations((8,))[0], 4) == []


@given(text=st.lists(st.integers(0, 2), max_size=20), parts=st.integers(1, 6))
def test_it_is_the_same_however_the_text_came(text: list[int], parts: int) -> None:
    whole, pieces = LookupIndex(), LookupIndex()
    whole.extend(text)
    for start in range(0, len(text), parts):
        pieces.extend(text[start : start + parts])
    assert list(islice(whole.continuations()[0], 9)) == list(islice(pieces.continuations()[0], 9))
    assert len(pieces) == len(text)


def test_a_text_that_goes_on_differently_still_finds_what_it_was() -> None:
    index = LookupIndex()
    index.begin([1, 2, 3, 4, 5, 6])
    index.begin([1, 2, 3, 7, 4])
    assert len(index) == 5
    assert ids(index.continuations()[0], 2) == [5, 6]
    index.begin([1, 2, 3, 7, 4, 8, 3])
    assert ids(index.continuations()[0], 2) == [7, 4]


def test_what_others_wrote_is_found_and_marked_as_theirs() -> None:
    memory = TextMemory(1000)
    memory.remember([1, 2], [3, 4, 5])
    index = LookupIndex(memory)
    index.extend([8, 2])
    own, shared = (list(islice(found, 3)) for found in index.continuations())
    assert own == []
    assert [each.token_id for each in shared] == [3, 4, 5]
    assert all(each.is_shared for each in shared)


def test_two_memories_know_nothing_of_each_other() -> None:
    one, other = TextMemory(1000), TextMemory(1000)
    one.remember([1], [2, 3])
    index = LookupIndex(other)
    index.extend([1])
    assert all(ids(found, 3) == [] for found in index.continuations())


@pytest.mark.parametrize("max_tokens", [2, 3, 16, 100])
def test_a_memory_is_bounded_and_keeps_the_newest_half(max_tokens: int) -> None:
    memory = TextMemory(max_tokens)
    index = LookupIndex(memory)
    for start in range(0, 1000, 10):
        memory.extend(range(start, start + 10))
        assert max_tokens // 2 - 1 <= memory.num_tokens <= max_tokens or start < max_tokens
    if max_tokens >= 16:
        index.extend([999 - max_tokens // 2 + 2])
        assert ids(index.continuations()[1], 1) == [999 - max_tokens // 2 + 3]
    index.extend([5])
    assert ids(index.continuations()[1], 1) == []


def test_texts_that_rest_keep_nothing_alive_that_their_memory_has_let_go() -> None:
    memory, resting, seen = TextMemory(100), [], []
    for start in range(6):
        index = LookupIndex(memory)
        index.extend([1, 2, 3])
        resting.append(index)
        memory.extend(range(100 * start, 100 * start + 120))
        seen += [ref(automaton) for automaton in memory.automata if all(each() is not automaton for each in seen)]
    gc.collect()
    assert len(seen) > 6
    assert {each() for each in seen} - {None} == set(memory.automata)
    # One of them finds what has come since all the same.
    resting[0].extend([610, 611])
    assert ids(resting[0].continuations()[1], 2) == [612, 613]


def test_a_text_over_its_own_bound_goes_on_from_its_newest_part() -> None:
    index = LookupIndex(max_tokens=40)
    index.extend([*range(100), 95])
    assert ids(index.continuations()[0], 3) == [96, 97, 98]
    index.extend([3])
    assert ids(index.continuations()[0], 3) == []
    with pytest.raises(ValueError, match="2 tokens or more"):
        LookupIndex(max_tokens=1)


@pytest.mark.parametrize("vocab", [3, 50, 5000])
def test_a_step_in_a_long_text_takes_microseconds(vocab: int) -> None:
    index = LookupIndex()
    index.extend(random_prompt(30_000, vocab=vocab))
    started = time.process_time()
    for token in random_prompt(1000, seed=1, vocab=vocab):
        index.extend([token])
        list(islice(index.continuations()[0], 4))
    assert (time.process_time() - started) / 1000 < 500e-6


def test_a_text_of_one_token_over_and_over_is_taken_in_as_quickly() -> None:
    automaton = SuffixAutomaton()
    started = time.process_time()
    automaton.extend([7] * 20_000)
    assert time.process_time() - started < 20_000 * 200e-6
