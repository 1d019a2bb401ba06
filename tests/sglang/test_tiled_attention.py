"""Attention in tiles against a softmax written out."""

from __future__ import annotations

import pytest
import torch

from spec_stack.sglang.tiled_attention import Window, attend


@pytest.mark.parametrize("num_queries", [1, 2, 7, 24])
@pytest.mark.parametrize("most_scores", [1, 200, 1 << 20])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_every_query_sees_the_keys_up_to_its_own(num_queries: int, most_scores: int, is_contiguous: bool) -> None:
    torch.manual_seed(num_queries)
    num_tokens, heads, groups = 24, 2, 3
    queries = torch.randn(heads * groups, num_queries, 8)
    # As the pool holds them: tokens first, in a larger buffer.
    buffers = torch.randn(2, 60, heads, 8)
    slots = torch.arange(11, 11 + num_tokens) if is_contiguous else torch.randperm(60)[:num_tokens]
    read = slice(11, 11 + num_tokens) if is_contiguous else slots
    keys, values = (buffer[read].transpose(0, 1) for buffer in buffers)
    output = attend(queries, keys, values, 0.3, most_scores)
    for head in range(heads * groups):
        for at in range(num_queries):
            seen = slots[: num_tokens - num_queries + at + 1]
            scores = buffers[0, seen, head // groups] @ queries[head, at] * 0.3
            weights = scores.exp() / scores.exp().sum()
            torch.testing.assert_close(
                output[head, at], weights @ buffers[1, seen, head // groups], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("num_queries", [1, 5, 130, 300])
@pytest.mark.parametrize(("num_tokens", "num_sinks"), [(1, 0), (7, 3), (64, 0), (64, 100), (200, 64), (500, 0)])
def test_every_query_sees_its_window_and_the_sinks(num_queries: int, num_tokens: int, num_sinks: int) -> None:
    torch.manual_seed(num_queries)
    queries, keys, values = torch.randn(4, num_queries, 8), torch.randn(2, 300, 8), torch.randn(2, 300, 8)
    output = attend(queries, keys, values, 0.3, window=Window(num_tokens, num_sinks))
    for at in range(0, num_queries, 13):
        own = 300 - num_queries + at
        seen = [key for key in range(own + 1) if key > own - num_tokens or key < num_sinks]
        for head in range(4):
            weights = (keys[head // 2, seen] @ queries[head, at] * 0.3).softmax(0)
            torch.testing.assert_close(output[head, at], weights @ values[head // 2, seen], atol=1e-5, rtol=1e-4)
