"""Importance where tensor-parallel ranks share the draft's heads. No SGLang here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import Ranks, ScoredLayer, Segment, last_attention

# Two questions that count in full, and text between them.
SEGMENTS = (Segment((0, 1), (43, 45), True), Segment((1, 2), (45, 47)), Segment((2, 3), (47, 50), True))
WEIGHTS = (1.0, 0.5, 1.0)
Layers = Mapping[int, ScoredLayer]


class _Rank(Ranks):
    def __init__(self, rank: int, num: int) -> None:
        self.rank, self.num = rank, num


def _attention(layers: Layers, rank: int = 0, num_ranks: int = 1) -> CapturedAttention:
    return CapturedAttention(layers, 3, segments=SEGMENTS, ranks=_Rank(rank, num_ranks))


def _of_rank(layers: Layers, rank: int) -> CapturedAttention:
    """Over the first or second half of the heads, as a rank of two holds them."""
    half = {
        index: ScoredLayer(layer.queries.chunk(2)[rank], layer.keys.chunk(2)[rank], layer.scaling)
        for index, layer in layers.items()
    }
    return _attention(half, rank, 2)


@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize("heads", [((1, 2), (1, 3)), ((0, 1), (1, 2)), None])
def test_ranks_that_share_the_heads_find_together_what_one_finds_alone(reduction: Any, heads: Any) -> None:
    torch.manual_seed(1)
    layers = {index: ScoredLayer(torch.randn(4, 3, 8), torch.randn(2, 50, 8), 0.3) for index in range(2)}
    config, whole, ranks = PrefillConfig(scoring_heads=heads, head_reduction=reduction), _attention(layers), []
    for rank in range(2):
        ranks.append(_of_rank(layers, rank))
        # A mean is over the scoring heads of all ranks.
        assert ranks[-1].num_scoring_heads(config) == whole.num_scoring_heads(config)
    each = [rank.reduce_heads(config, WEIGHTS) for rank in ranks]
    found = torch.maximum(*each) if reduction == "max" else sum(each)
    torch.testing.assert_close(found, whole.reduce_heads(config, WEIGHTS))
    everyone = PrefillConfig()
    last = [last_attention(rank.scoring_layers(everyone), 3) for rank in ranks]
    torch.testing.assert_close((last[0] + last[1]) / 2, last_attention(whole.scoring_layers(everyone), 3))
