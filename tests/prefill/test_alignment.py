from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.prefill.alignment import Span, map_importance, overlaps
from tests.support import reference

LENGTH = 40


@st.composite
def tokenizations(draw: st.DrawFn) -> list[Span]:
    """Spans that follow a text of LENGTH characters: some characters in no token, some in several tokens (pieces of one
    character), and tokens without characters at the front."""
    spans: list[Span] = [(0, 0)] * draw(st.integers(0, 2))
    at = 0
    while at < LENGTH:
        at += draw(st.integers(0, 2))
        stop = min(at + draw(st.integers(1, 6)), LENGTH)
        if at < stop:
            spans += [(at, stop)] * (draw(st.integers(1, 4)) if stop == at + 1 else 1)
        at = stop
    return spans


@given(tokenizations(), tokenizations(), st.integers(0, 2**32 - 1))
def test_importance_is_mapped_as_character_by_character(target: list[Span], draft: list[Span], seed: int) -> None:
    importance = torch.rand(len(draft), generator=torch.Generator().manual_seed(seed))
    mapped = map_importance(importance, overlaps(target, draft))
    assert mapped.tolist() == reference.importance_by_characters(importance.tolist(), target, draft)


@given(tokenizations(), tokenizations())
def test_ranges_never_start_before_an_earlier_one(target: list[Span], draft: list[Span]) -> None:
    starts = [start for start, _ in overlaps(target, draft)]
    assert starts == sorted(starts)


def test_a_token_without_characters_overlaps_nothing() -> None:
    ranges = overlaps([(0, 0), (0, 2)], [(0, 0), (0, 1), (1, 2)])
    assert ranges == [(1, 1), (1, 3)]
    assert map_importance(torch.tensor([9.0, 0.1, 0.2]), ranges).tolist() == pytest.approx([0.0, 0.2])
    assert overlaps([(0, 1)], [(0, 0)]) == [(1, 1)]
    # A draft token whose spaces its tokenizer trimmed away counts between two that the target token overlaps.
    assert overlaps([(0, 5), (5, 6)], [(0, 2), (3, 3), (3, 5), (5, 6)]) == [(0, 3), (3, 4)]


def test_offsets_that_run_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        overlaps([(0, 2)], [(1, 2), (0, 1)])
