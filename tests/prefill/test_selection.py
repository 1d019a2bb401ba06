"""What a rule keeps of chunks, and what it scores by."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.importance import ScoredLayer, choose_heads
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.registry import SCORERS, make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import ChunkSegments
from spec_stack.prefill.selection import select
from tests.support import reference
from tests.support.scoring import token_importance

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


def test_every_rule_that_is_registered_prunes_a_prompt() -> None:
    importance = torch.rand(200, generator=torch.Generator().manual_seed(1))
    assert set(SCORERS) >= {"attention", "bm25"}
    for scorer in SCORERS:
        kept = select(evidence(200, importance), PrefillConfig(scorer=scorer)).positions
        assert len(kept) < 200, scorer


def test_the_papers_rule_is_the_mean_importance_of_chunks_of_32() -> None:
    paper = PrefillConfig.full_look_ahead()
    importance = torch.rand(200, generator=torch.Generator().manual_seed(1))
    scores = make_rule(paper.scorer).score(evidence(200, importance), ChunkSegments(200, 32), paper)
    padded = torch.cat([importance, torch.zeros(24)]).reshape(7, 32)
    assert torch.equal(scores, padded.mean(1))


def test_without_importance_attention_is_refused_and_bm25_is_not() -> None:
    with pytest.raises(ValueError, match="attention is missing"):
        select(ScoringInputs(PromptText(range(300))), PrefillConfig())
    ids = [*range(300, 1300), 350, 351, 352]
    kept = select(ScoringInputs(PromptText(ids)), PrefillConfig(scorer="bm25", keep_rate=0.15)).positions
    assert {50, 51, 52} <= set(kept)


def test_chosen_heads_score_as_if_there_were_no_others() -> None:
    torch.manual_seed(0)
    queries, keys, sinks = torch.randn(6, 3, 8), torch.randn(2, 50, 8), torch.randn(6)
    picked = choose_heads(ScoredLayer(queries, keys, 0.3, sinks), [1, 4])
    alone = [ScoredLayer(queries[h : h + 1], keys[h // 3 : h // 3 + 1], 0.3, sinks[h : h + 1]) for h in (1, 4)]
    torch.testing.assert_close(token_importance([picked], 5), token_importance(alone, 5))


def test_the_keep_rate_may_be_a_curve_by_length() -> None:
    config = PrefillConfig(keep_rate=((2000, 0.3), (8000, 0.1)))
    assert [config.rate_for(n) for n in (100, 2000, 8000, 90000)] == [0.3, 0.3, 0.1, 0.1]
    assert config.rate_for(4000) == pytest.approx(0.2)
    assert PrefillConfig(keep_rate=0.25).rate_for(5) == 0.25


@pytest.mark.parametrize(
    "bad",
    [
        {"keep_rate": ()},
        {"keep_rate": ((2000, 0.3), (1000, 0.1))},
        {"keep_rate": ((2000, 1.5),)},
        {"draft_window": 0},
        {"draft_window": (2048, 0)},
        {"draft_window": (-1, 512)},
        {"draft_window": (2048, 512, 1)},
        {"draft_sinks": -1},
        {"scoring_heads": ()},
        {"scoring_heads": ((0, -1),)},
        {"scoring_heads": (3,)},
        {"scorer": "votes"},
        {"granularity": "words"},
        {"scoring_queries": "all"},
        {"head_reduction": "sum"},
        {"first_scoring_layer": -1},
        {"positions": "Original"},
        {"positions": None},
        {"max_dropped_attention": -0.1},
        {"max_dropped_attention": 1.1},
        {"max_dropped_attention": float("nan")},
        {"check_tokens": 0},
        {"check_rates": (0.4, 0.2)},
        {"check_rates": (0.5, 1.0)},
    ],
)
def test_what_cannot_be_scored_by_is_refused_at_construction(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PrefillConfig(**bad)  # type: ignore[arg-type]


def test_what_says_how_to_answer_is_kept_behind_the_question() -> None:
    notes = "".join(f"Note {n} is about box {n} of the region.\n" for n in range(60))
    how = "Return an object with the fields of the answer and of the box. No more."
    pieces = re.findall(r"\s*\S+", f"{notes}\nWhat is in box 7?\n{how}")
    config = PrefillConfig(scorer="bm25", keep_rate=0.1, keep_last=1, chunk_size=12)
    positions = select(ScoringInputs(PromptText(range(len(pieces)), pieces)), config).positions
    assert {*range(len(pieces) - len(how.split()), len(pieces))} <= {*positions}
