"""Importance by the heads of a rank: chosen heads, and ranks that share the heads. No server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import (
    Ranks,
    ScoredLayer,
    Segment,
    attention_to_prompt,
    last_attention,
    over_queries,
    pool,
)
from tests.support.cuda import blocking_copies

# Two questions that count in full, and text between them.
SEGMENTS = (Segment((0, 1), (43, 45), True), Segment((1, 2), (45, 47)), Segment((2, 3), (47, 50), True))
WEIGHTS = (1.0, 0.5, 1.0)
Layers = Mapping[int, ScoredLayer]


def _layers(num_heads: int, num_kv_heads: int = 2, device: str = "cpu") -> Layers:
    def made(heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(heads, num_tokens, 8).to(device)

    return {index: ScoredLayer(made(num_heads, 3), made(num_kv_heads, 50), 0.3) for index in range(2)}


def _of_rank(layers: Layers, rank: int) -> Layers:
    """The first or second half of the heads, as a rank of two holds them."""
    return {
        index: ScoredLayer(layer.queries.chunk(2)[rank], layer.keys.chunk(2)[rank], layer.scaling)
        for index, layer in layers.items()
    }


class _Rank(Ranks):
    def __init__(self, rank: int, num: int) -> None:
        self.rank, self.num = rank, num


def _attention(layers: Layers, rank: int = 0, num_ranks: int = 1, segments: Any = ()) -> CapturedAttention:
    num_in_place = 3 if segments else 1
    return CapturedAttention(layers, num_in_place, segments=segments, ranks=_Rank(rank, num_ranks))


@pytest.mark.parametrize("heads", [None, ((1, 1), (1, 4)), ((0, 5), (1, 0), (1, 1))])
def test_the_votes_are_those_of_each_head_by_itself(heads: Any) -> None:
    torch.manual_seed(0)
    layers = _layers(6)
    best = torch.zeros(3, 50)
    for index, layer in layers.items():
        for head in range(6):
            # At most half of the layers are skipped, and so the first of two.
            if (heads is None and index == 1) or (heads is not None and (index, head) in heads):
                one = layer.queries[head : head + 1], layer.keys[head // 3 : head // 3 + 1], layer.scaling
                best = torch.maximum(best, pool(attention_to_prompt(*one), 5)[0])
    config = PrefillConfig(scoring_heads=heads, head_reduction="max", pool_kernel=5)
    torch.testing.assert_close(_attention(layers).votes(config, ()), best)


def test_the_sum_over_chosen_heads_is_that_of_each_head_by_itself() -> None:
    torch.manual_seed(2)
    layers, heads = _layers(6), ((0, 5), (1, 0), (1, 1))
    expected = torch.zeros(50)
    for index, head in heads:
        own = layers[index].queries[head : head + 1], layers[index].keys[head // 3][None]
        expected += over_queries(attention_to_prompt(*own, 0.3, None, 3), SEGMENTS, WEIGHTS)[0]
    config = PrefillConfig(scoring_heads=heads, head_reduction="mean")
    torch.testing.assert_close(_attention(layers, 0, 1, SEGMENTS).votes(config, WEIGHTS), expected)
    of_two = _attention(_of_rank(_layers(6), 0), 0, 2)
    assert of_two.num_voters(config) == 3
    assert of_two.num_voters(PrefillConfig()) == 6


@pytest.mark.parametrize("vote", ["max", "mean"])
@pytest.mark.parametrize("heads", [((1, 2), (1, 3)), ((0, 1), (1, 2)), None])
def test_ranks_that_share_the_heads_find_together_what_one_finds_alone(vote: Any, heads: Any) -> None:
    torch.manual_seed(1)
    layers = _layers(4)
    config = PrefillConfig(scoring_heads=heads, head_reduction=vote)
    alone = _attention(layers, 0, 1, SEGMENTS).votes(config, WEIGHTS)
    ranks = [_attention(_of_rank(layers, rank), rank, 2, SEGMENTS) for rank in range(2)]
    each = [rank.votes(config, WEIGHTS) for rank in ranks]
    torch.testing.assert_close(torch.maximum(*each) if vote == "max" else sum(each), alone)
    everyone = PrefillConfig()
    last = [last_attention(rank.voting(everyone), 3) for rank in ranks]
    whole = last_attention(_attention(layers).voting(everyone), 3)
    torch.testing.assert_close((last[0] + last[1]) / 2, whole)


@pytest.mark.parametrize("heads", [None, ((0, 5), (1, 0), (1, 1))])
@pytest.mark.parametrize("vote", ["max", "mean"])
def test_the_host_waits_for_no_copy(heads: Any, vote: Any) -> None:
    layers = _layers(6, device="meta")
    with blocking_copies() as found:
        _attention(layers).votes(PrefillConfig(scoring_heads=heads, head_reduction=vote), ())
    assert found == []
