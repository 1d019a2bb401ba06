from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.prefill.importance import choose_heads, token_importance
from spec_stack.prefill.registry import SCORERS, make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import ChunkSegments
from spec_stack.prefill.selection import select
from spec_stack.prefill.words import pair_scores, rare_words
from tests.support import reference

prompts = st.lists(st.integers(0, 12), min_size=1, max_size=120)


@given(prompts, st.integers(0, 40), st.integers(1, 9), st.sampled_from([float("inf"), 3.0]))
def test_rare_words_equal_counting_every_gram_by_hand(ids: list[int], tail: int, size: int, half_life: float) -> None:
    question = max(0, len(ids) - tail), len(ids)
    got = rare_words(ids, question, ChunkSegments(len(ids), size), half_life)
    expected = reference.rare_words(ids, question[0], size, half_life)
    assert got.tolist() == pytest.approx(expected)


def test_a_rare_word_of_the_question_outweighs_a_common_one() -> None:
    ids = [5] * 64 + [7] + [5] * 63 + [9] * 3 + [5, 7]
    scores = rare_words(ids, (len(ids) - 2, len(ids)), ChunkSegments(len(ids), 16))
    assert scores.argmax() == 4
    assert torch.nonzero(scores)[:, 0].tolist() == [3, 4]


@given(st.lists(st.integers(0, 30), max_size=200), st.lists(st.integers(0, 30), max_size=12), st.integers(1, 9))
def test_pairs_equal_looking_at_every_two_tokens_by_hand(body: list[int], question: list[int], size: int) -> None:
    expected = reference.pair_scores(body, question, size)
    span = len(body), len(body) + len(question)
    assert pair_scores([*body, *question], span, ChunkSegments(len(body), size)).tolist() == pytest.approx(expected)


def test_a_line_with_two_common_words_of_the_question_outweighs_lines_with_one() -> None:
    lines = [[100 + name, 50, 200 + colour, *range(20, 45)] for name in range(6) for colour in range(6)]
    body = [token for line in lines for token in line]
    segments = ChunkSegments(len(body), len(lines[0]))
    scores = pair_scores([*body, 7, 203, 50, 104, 8], (len(body), len(body) + 5), segments)
    assert torch.nonzero(scores == scores.max())[:, 0].tolist() == [4 * 6 + 3]
    assert scores.max() == 1
    assert scores.sum() == 1


def test_every_rule_that_is_registered_prunes_a_prompt() -> None:
    importance = torch.rand(200, generator=torch.Generator().manual_seed(1))
    assert set(SCORERS) >= {"attention", "bm25"}
    for scorer in SCORERS:
        kept = select(ScoringInputs(range(200), importance=importance), PrefillConfig(scorer=scorer)).positions
        assert len(kept) < 200, scorer


def test_the_papers_rule_is_the_mean_importance_of_chunks_of_32() -> None:
    paper = PrefillConfig.full_look_ahead()
    importance = torch.rand(200, generator=torch.Generator().manual_seed(1))
    scores = make_rule(paper.scorer).score(
        ScoringInputs(range(200), importance=importance), ChunkSegments(200, 32), paper
    )
    padded = torch.cat([importance, torch.zeros(24)]).reshape(7, 32)
    assert torch.equal(scores, padded.mean(1))


def test_without_importance_attention_is_refused_and_bm25_is_not() -> None:
    with pytest.raises(ValueError, match="attention is missing"):
        select(ScoringInputs(range(300)), PrefillConfig())
    ids = [*range(300, 1300), 350, 351, 352]
    kept = select(ScoringInputs(ids), PrefillConfig(scorer="bm25", keep_rate=0.15)).positions
    assert {50, 51, 52} <= set(kept)


def test_chosen_heads_score_as_if_there_were_no_others() -> None:
    torch.manual_seed(0)
    queries, keys, sinks = torch.randn(6, 3, 8), torch.randn(2, 50, 8), torch.randn(6)
    picked = choose_heads((queries, keys, 0.3, sinks), [1, 4])
    alone = [(queries[h : h + 1], keys[h // 3 : h // 3 + 1], 0.3, sinks[h : h + 1]) for h in (1, 4)]
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
        {"num_scoring_layers": 0},
        {"scoring_heads": ()},
        {"scoring_heads": ((0, -1),)},
        {"scoring_heads": (3,)},
        {"scorer": "votes"},
        {"granularity": "words"},
        {"scoring_queries": "all"},
        {"head_reduction": "sum"},
        {"first_scoring_layer": -1},
    ],
)
def test_what_cannot_be_scored_by_is_refused_at_construction(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PrefillConfig(**bad)  # type: ignore[arg-type]
