"""The n-gram index and the shared cache of texts, against comparing every place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.controller.ngram import NgramToken
from spec_stack.decode.ngram_index import NgramIndex, SharedNgramCache
from tests.support.models import random_prompt
from tests.support.reference_lookup import longest_followed

# The index compares the 16 newest places of an n-gram, which are all of them in so short texts.
texts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=3)


@given(several=texts, tail=st.lists(st.integers(0, 3), max_size=5))
def test_the_longest_end_that_anything_followed_is_found_with_what_followed_it_most_often(
    several: list[list[int]], tail: list[int]
) -> None:
    memory = SharedNgramCache()
    for text in several:
        memory.begin_text()
        memory.extend(text)
    found = next(memory.continuation([*several[-1], *tail]), None)
    expected = longest_followed(several, [*several[-1], *tail])
    assert (found and found[:4]) == (expected and (expected[1], *(expected[at] for at in (0, 2, 3))))


def ids(found: Iterator[NgramToken], num_tokens: int) -> list[int]:
    return [each.token_id for each in islice(found, num_tokens)]


@pytest.mark.parametrize("num_places", [33, 40, 49])
def test_of_many_places_the_newest_are_compared(num_places: int) -> None:
    index = NgramIndex()
    index.extend([token_id for number in range(num_places) for token_id in (1, 2, 3, 100 + number)])
    index.extend([1, 2, 3])
    newest = next(index.continuations()[0])
    assert (newest.token_id, newest.length) == (99 + num_places, 3)
    assert newest.num_seen + newest.num_others <= 16


def test_a_continuation_goes_on_past_the_end_of_the_text_with_itself() -> None:
    index = NgramIndex()
    index.extend([9, 4, 5, 6, 4, 5, 6, 4])
    assert ids(index.continuations()[0], 7) == [5, 6, 4, 5, 6, 4, 5]
    assert ids(index.continuations((5,))[0], 4) == [6, 4, 5, 6]
    assert ids(index.continuations((), {6})[0], 4) == [5, 6]
    assert ids(index.continuations((8,))[0], 4) == []


@given(text=st.lists(st.integers(0, 2), max_size=20), parts=st.integers(1, 6))
def test_it_is_the_same_however_the_text_came(text: list[int], parts: int) -> None:
    whole, pieces = NgramIndex(), NgramIndex()
    whole.extend(text)
    for start in range(0, len(text), parts):
        pieces.extend(text[start : start + parts])
    assert list(islice(whole.continuations()[0], 9)) == list(islice(pieces.continuations()[0], 9))
    assert len(pieces) == len(text)


def test_a_text_that_goes_on_differently_still_finds_what_it_was() -> None:
    index = NgramIndex()
    index.begin([1, 2, 3, 4, 5, 6])
    index.begin([1, 2, 3, 7, 4])
    assert len(index) == 5
    assert ids(index.continuations()[0], 2) == [5, 6]
    index.begin([1, 2, 3, 7, 4, 8, 3])
    assert ids(index.continuations()[0], 2) == [7, 4]


def test_what_others_wrote_is_found_and_marked_as_theirs() -> None:
    memory = SharedNgramCache(1000)
    memory.remember([1, 2], [3, 4, 5])
    index = NgramIndex(memory)
    index.extend([8, 2])
    own, shared = (list(islice(found, 3)) for found in index.continuations())
    assert own == []
    assert [each.token_id for each in shared] == [3, 4, 5]
    assert all(each.is_shared for each in shared)


def test_nothing_goes_on_from_one_text_into_the_next() -> None:
    memory = SharedNgramCache(1000)
    memory.remember([], [1, 2])
    memory.remember([], [3, 4])
    assert ids(memory.continuation([1]), 3) == [2]
    assert ids(memory.continuation([2]), 3) == []
    assert ids(memory.continuation([2, 3]), 3) == [4]


@pytest.mark.parametrize("max_tokens", [2, 3, 16, 100])
def test_a_memory_is_bounded_and_keeps_the_newest_half(max_tokens: int) -> None:
    memory = SharedNgramCache(max_tokens)
    index = NgramIndex(memory)
    for start in range(0, 1000, 10):
        memory.extend(range(start, start + 10))
        assert max_tokens // 2 - 1 <= memory.num_tokens <= max_tokens or start < max_tokens
    if max_tokens >= 16:
        index.extend([999 - max_tokens // 2 + 2])
        assert ids(index.continuations()[1], 1) == [999 - max_tokens // 2 + 3]
    index.extend([5])
    assert ids(index.continuations()[1], 1) == []


def test_a_memory_of_many_short_texts_is_bounded_too() -> None:
    memory = SharedNgramCache(64)
    for start in range(0, 500, 3):
        memory.remember([start], [start + 1, start + 2])
        assert memory.num_tokens <= 64
    assert ids(memory.continuation([498]), 2) == [499, 500]


def test_a_text_over_its_own_bound_goes_on_from_its_newest_part() -> None:
    index = NgramIndex(max_tokens=40)
    index.extend([*range(100), 95])
    assert ids(index.continuations()[0], 3) == [96, 97, 98]
    index.extend([3])
    assert ids(index.continuations()[0], 3) == []
    with pytest.raises(ValueError, match="2 tokens or more"):
        NgramIndex(max_tokens=1)


@pytest.mark.parametrize("vocab", [3, 5000])
def test_a_step_in_a_long_text_takes_microseconds(vocab: int) -> None:
    index = NgramIndex()
    index.extend(random_prompt(30_000, vocab=vocab))
    seconds = []
    for token in random_prompt(1000, seed=1, vocab=vocab):
        started = time.thread_time()
        index.extend([token])
        list(islice(index.continuations()[0], 4))
        seconds.append(time.thread_time() - started)
    # A scan of the whole text takes milliseconds. The median leaves out what a loaded machine adds to some steps.
    assert median(seconds) < 1e-3


def test_a_text_of_one_token_over_and_over_is_taken_in_as_quickly() -> None:
    index = NgramIndex()
    started = time.thread_time()
    index.extend([7] * 20_000)
    list(islice(index.continuations()[0], 64))
    # 0.5 ms a token: work that grew with the text would take a hundred times as long.
    assert time.thread_time() - started < 20_000 * 500e-6
