from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.selection import select
from tests.support import reference

settings_of_a_selection = {
    "num_tokens": st.integers(1, 400),
    "keep_rate": st.floats(0.01, 1.0),
    "chunk_size": st.integers(1, 40),
    "keep_first": st.integers(0, 3),
    "keep_last": st.integers(1, 3),
    "seed": st.integers(0, 10_000),
}


def evidence(num_tokens: int, importance: torch.Tensor, protected: Sequence[tuple[int, int]] = ()) -> ScoringInputs:
    return ScoringInputs(PromptText(range(num_tokens), protected=protected), importance=importance)


@given(**settings_of_a_selection)
def test_a_selection_is_sorted_unique_whole_chunks_with_both_ends(
    num_tokens: int, keep_rate: float, chunk_size: int, keep_first: int, keep_last: int, seed: int
) -> None:
    importance = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed))
    config = PrefillConfig(keep_rate=keep_rate, chunk_size=chunk_size, keep_first=keep_first, keep_last=keep_last)
    positions = list(select(evidence(num_tokens, importance), config).positions)
    assert positions == sorted(set(positions))
    chunks = {position // chunk_size for position in positions}
    whole = {p for chunk in chunks for p in range(chunk * chunk_size, min((chunk + 1) * chunk_size, num_tokens))}
    assert set(positions) == whole
    assert num_tokens - 1 in positions
    assert set(range(min(keep_first * chunk_size, num_tokens))) <= set(positions)
    num_chunks = math.ceil(num_tokens / chunk_size)
    forced = min(num_chunks, keep_first + keep_last)
    assert len(chunks) == max(forced, math.ceil(keep_rate * num_chunks - 1e-9))
    assert positions == reference.selected_positions(
        importance.double().tolist(), keep_rate, chunk_size, keep_first, keep_last
    )


@pytest.mark.parametrize("span", [(100, 103), (0, 640), (-5, 2), (630, 999)])
def test_protected_tokens_come_on_top_of_the_chunks(span: tuple[int, int]) -> None:
    importance = torch.rand(640, generator=torch.Generator().manual_seed(3))
    plain = set(select(evidence(640, importance), PrefillConfig(keep_rate=0.2)).positions)
    protected = set(select(evidence(640, importance, [span]), PrefillConfig(keep_rate=0.2)).positions)
    assert protected == plain | set(range(max(span[0], 0), min(span[1], 640)))
