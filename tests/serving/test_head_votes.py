"""Importance by the heads of a rank: chosen heads, and ranks that share the heads. No server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.importance import (
    ScoredLayer,
    Segment,
    attention_to_prompt,
    opening_attention,
    over_queries,
    pool,
)
from spec_stack.sglang.scoring import num_voters, own_layers, own_votes
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


def _votes(layers: Layers, config: PrefillConfig, rank: int = 0, num_in_place: int = 1, *queries: Any) -> torch.Tensor:
    # Questions, or queries.
    num_rows = (2 if queries else 1) if config.head_reduction == "mean" else 3
    votes = torch.zeros(num_rows, 50, device=layers[0].queries.device)
    return own_votes(votes, own_layers(layers, layers.__getitem__, config, rank), config, num_in_place, *queries)


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
    torch.testing.assert_close(_votes(layers, config), best)


def test_the_sum_over_chosen_heads_is_that_of_each_head_by_itself() -> None:
    torch.manual_seed(2)
    layers, heads = _layers(6), ((0, 5), (1, 0), (1, 1))
    expected = torch.zeros(2, 50)
    for index, head in heads:
        own = layers[index].queries[head : head + 1], layers[index].keys[head // 3][None]
        expected += over_queries(attention_to_prompt(*own, 0.3, None, 3), SEGMENTS, WEIGHTS)[0]
    config = PrefillConfig(scoring_heads=heads, head_reduction="mean")
    torch.testing.assert_close(_votes(layers, config, 0, 3, SEGMENTS, WEIGHTS), expected)
    captured = {index: [layer.queries] for index, layer in layers.items()}
    assert num_voters(captured, config, 2) == 3
    assert num_voters(captured, PrefillConfig(), 2) == 12


@pytest.mark.parametrize("vote", ["max", "mean"])
@pytest.mark.parametrize("heads", [((1, 2), (1, 3)), ((0, 1), (1, 2)), None])
def test_ranks_that_share_the_heads_find_together_what_one_finds_alone(vote: Any, heads: Any) -> None:
    torch.manual_seed(1)
    layers = _layers(4)
    config = PrefillConfig(scoring_heads=heads, head_reduction=vote)
    alone = _votes(layers, config, 0, 3, SEGMENTS, WEIGHTS)
    each = [_votes(_of_rank(layers, rank), config, rank, 3, SEGMENTS, WEIGHTS) for rank in range(2)]
    torch.testing.assert_close(torch.maximum(*each) if vote == "max" else sum(each), alone)
    everyone = PrefillConfig()
    of_ranks = [own_layers(layers, _of_rank(layers, rank).__getitem__, everyone, rank) for rank in range(2)]
    opening = [opening_attention(own, 3, 1) for own in of_ranks]
    whole = opening_attention(own_layers(layers, layers.__getitem__, everyone, 0), 3, 1)
    torch.testing.assert_close((opening[0] + opening[1]) / 2, whole)


def test_a_head_of_a_layer_that_the_draft_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"names layers \[7\]"):
        _votes(_layers(2, 1), PrefillConfig(scoring_heads=((7, 0),)))


@pytest.mark.parametrize("heads", [None, ((0, 5), (1, 0), (1, 1))])
@pytest.mark.parametrize("vote", ["max", "mean"])
def test_the_host_waits_for_no_copy(heads: Any, vote: Any) -> None:
    layers = _layers(6, device="meta")
    with blocking_copies() as found:
        _votes(layers, PrefillConfig(scoring_heads=heads, head_reduction=vote))
    assert found == []
