"""Importance out of a KV pool: chosen heads, ranks that share the heads, keys in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.importance import attention_to_prompt, pool
from spec_stack.sglang.head_votes import LayerQueries, best_of_own_heads
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
    config = PrefillConfig(scoring_heads=heads, pool_kernel=5)
    got = best_of_own_heads(Pool(keys), slots, layers, config)
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


def test_the_mean_of_chosen_heads_shares_is_that_of_each_head_by_itself() -> None:
    torch.manual_seed(2)
    keys, slots = [torch.randn(60, 2, 8) for _ in range(2)], torch.randperm(60)[:50]
    layers, heads = _captured(keys, 6), ((0, 5), (1, 0), (1, 1))
    config = PrefillConfig(scoring_heads=heads, head_vote="share", chunk_size=4)
    shares = []
    for index, head in heads:
        queries = torch.cat(layers[index].queries, dim=1)[head : head + 1]
        # Three of the prompt's last tokens ask, and none sees what comes after it.
        weights = attention_to_prompt(queries, keys[index][slots, head // 3][None], 0.3, None, 3)[0].mean(dim=0)
        first, last = config.forced_tokens
        weights[:first] = weights[50 - last :] = 0
        shares.append(weights / weights.sum())
    got = best_of_own_heads(Pool(keys), slots, layers, config, num_asking=3)
    torch.testing.assert_close(got, torch.stack(shares).mean(dim=0)[None])


def test_ranks_that_share_the_heads_find_together_what_one_finds_alone() -> None:
    torch.manual_seed(1)
    keys = [torch.randn(40, 2, 8) for _ in range(2)]
    slots, whole = torch.arange(40), _captured(keys, 4)
    config = PrefillConfig(scoring_heads=((1, 2), (1, 3)))
    alone = best_of_own_heads(Pool(keys), slots, whole, config)
    parts = []
    for rank in range(2):
        own = {
            index: LayerQueries(0.3, [query[2 * rank : 2 * rank + 2] for query in found.queries])
            for index, found in whole.items()
        }
        part = Pool([key[:, rank : rank + 1] for key in keys])
        parts.append(best_of_own_heads(part, slots, own, config, rank))
    assert not parts[0].any()
    torch.testing.assert_close(torch.maximum(*parts), alone)


def test_a_head_of_a_layer_that_the_draft_lacks_is_named() -> None:
    keys = [torch.randn(30, 1, 8)]
    with pytest.raises(ValueError, match=r"names layers \[7\]"):
        best_of_own_heads(Pool(keys), torch.arange(30), _captured(keys, 2), PrefillConfig(scoring_heads=((7, 0),)))


@pytest.mark.parametrize("heads", [None, ((0, 5), (1, 0), (1, 1))])
@pytest.mark.parametrize("vote", ["max", "share"])
def test_the_host_waits_for_no_copy(heads: Any, vote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is nothing to read on meta.
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(tensor.shape))
    keys = [torch.empty(60, 2, 8, device="meta") for _ in range(2)]
    layers = {index: LayerQueries(0.3, [torch.empty(6, 3, 8, device="meta")]) for index in range(2)}
    config = PrefillConfig(scoring_heads=heads, head_vote=vote, chunk_size=4)
    with blocking_copies() as found:
        best_of_own_heads(Pool(keys), torch.zeros(50, dtype=torch.int64, device="meta"), layers, config)
    assert found == []
