"""Importance out of a KV pool: chosen heads, ranks that share the heads, keys in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.importance import Segment, attention_to_prompt, over_queries, pool
from spec_stack.sglang.pool_attention import (
    LayerQueries,
    Queries,
    num_scoring_heads,
    opening_of_own_heads,
    over_own_heads,
)
from tests.support.cuda import blocking_copies


class Pool:
    """SGLang's KV pool as far as scoring looks at it: keys (num_slots, num_kv_heads, head_dim) by layer."""

    def __init__(self, keys: list[torch.Tensor]) -> None:
        self._keys = keys

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self._keys[layer]


def _captured(keys: list[torch.Tensor], num_heads: int) -> dict[int, Any]:
    queries = [torch.randn(num_heads, 3, key.shape[-1]) for key in keys]
    return {index: LayerQueries(0.3, [query[:, :1], query[:, 1:]]) for index, query in enumerate(queries)}


@pytest.mark.parametrize("heads", [None, ((1, 1), (1, 4)), ((0, 5), (1, 0), (1, 1))])
def test_importance_from_the_pool_is_that_of_the_library_from_the_same_keys(heads: Any) -> None:
    torch.manual_seed(0)
    keys = [torch.randn(60, 2, 8) for _ in range(2)]
    slots = torch.randperm(60)[:50]
    layers = _captured(keys, 6)
    config = PrefillConfig(scoring_heads=heads, head_reduction="max", pool_kernel=5)
    got = over_own_heads(Pool(keys), slots, layers, config)
    whole = [
        (torch.cat(found.queries, dim=1), keys[index][slots].transpose(0, 1), found.scaling)
        for index, found in layers.items()
    ]
    best = torch.zeros(3, 50)
    for index, layer in enumerate(whole):
        for head in range(6):
            # At most half of the layers are skipped, and so the first of two.
            if (heads is None and index == 1) or (heads is not None and (index, head) in heads):
                one = layer[0][head : head + 1], layer[1][head // 3 : head // 3 + 1], layer[2]
                best = torch.maximum(best, pool(attention_to_prompt(*one), 5)[0])
    torch.testing.assert_close(got, best)


SEGMENTS = (Segment((0, 2), (45, 47)), Segment((2, 3), (47, 50), True))


def _part(whole: dict[int, LayerQueries], keys: list[torch.Tensor], rank: int) -> tuple[Pool, dict[int, LayerQueries]]:
    """The second or first half of the heads, as a rank of two holds them."""
    num_heads, num_keys = whole[0].queries[0].shape[0] // 2, keys[0].shape[1] // 2
    own = slice(rank * num_heads, (rank + 1) * num_heads)
    layers = {index: LayerQueries(0.3, [query[own] for query in found.queries]) for index, found in whole.items()}
    return Pool([key[:, rank * num_keys : (rank + 1) * num_keys] for key in keys]), layers


def test_the_sum_over_chosen_heads_is_that_of_each_head_by_itself() -> None:
    torch.manual_seed(2)
    keys, slots = [torch.randn(60, 2, 8) for _ in range(2)], torch.randperm(60)[:50]
    layers, heads = _captured(keys, 6), ((0, 5), (1, 0), (1, 1))
    config = PrefillConfig(scoring_heads=heads, head_reduction="mean")
    queries = Queries(3, SEGMENTS, (0.5, 1.0))
    expected = torch.zeros(50)
    for index, head in heads:
        own = torch.cat(layers[index].queries, dim=1)[head : head + 1]
        attention = attention_to_prompt(own, keys[index][slots, head // 3][None], 0.3, None, 3)
        expected += over_queries(attention, SEGMENTS, (0.5, 1.0))[0]
    got = over_own_heads(Pool(keys), slots, layers, config, found=queries)
    torch.testing.assert_close(got, expected)
    assert num_scoring_heads(layers, config, 2) == 3


@pytest.mark.parametrize("vote", ["max", "mean"])
@pytest.mark.parametrize("heads", [((1, 2), (1, 3)), ((0, 1), (1, 2)), None])
def test_ranks_that_share_the_heads_find_together_what_one_finds_alone(vote: Any, heads: Any) -> None:
    torch.manual_seed(1)
    keys = [torch.randn(50, 2, 8) for _ in range(2)]
    slots, whole = torch.arange(50), _captured(keys, 4)
    config, queries = PrefillConfig(scoring_heads=heads, head_reduction=vote), Queries(3, SEGMENTS, (0.5, 1.0), 1)
    alone = over_own_heads(Pool(keys), slots, whole, config, found=queries)
    parts = [_part(whole, keys, rank) for rank in range(2)]
    each = [over_own_heads(*_pair(part, slots), config, rank, queries) for rank, part in enumerate(parts)]
    torch.testing.assert_close(torch.maximum(*each) if vote == "max" else sum(each), alone)
    opening = [opening_of_own_heads(*_pair(part, slots), config, queries) for part in parts]
    whole_opening = opening_of_own_heads(Pool(keys), slots, whole, config, queries)
    torch.testing.assert_close((opening[0] + opening[1]) / 2, whole_opening)


def _pair(part: tuple[Pool, dict[int, LayerQueries]], slots: torch.Tensor) -> tuple[Any, Any, Any]:
    return part[0], slots, part[1]


def test_a_head_of_a_layer_that_the_draft_lacks_is_named() -> None:
    keys = [torch.randn(30, 1, 8)]
    with pytest.raises(ValueError, match=r"names layers \[7\]"):
        over_own_heads(Pool(keys), torch.arange(30), _captured(keys, 2), PrefillConfig(scoring_heads=((7, 0),)))


@pytest.mark.parametrize("heads", [None, ((0, 5), (1, 0), (1, 1))])
@pytest.mark.parametrize("vote", ["max", "mean"])
def test_the_host_waits_for_no_copy(heads: Any, vote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is nothing to read on meta.
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(tensor.shape))
    keys = [torch.empty(60, 2, 8, device="meta") for _ in range(2)]
    layers = {index: LayerQueries(0.3, [torch.empty(6, 3, 8, device="meta")]) for index in range(2)}
    config = PrefillConfig(scoring_heads=heads, head_reduction=vote, chunk_size=4)
    with blocking_copies() as found:
        over_own_heads(Pool(keys), torch.zeros(50, dtype=torch.int64, device="meta"), layers, config)
    assert found == []
