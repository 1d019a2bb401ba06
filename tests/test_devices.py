"""Attention in tiles against a softmax written out."""

from __future__ import annotations

import pytest
import torch

from spec_stack.devices import attend
from tests.support.cuda import blocking_copies, flash_on_cpu


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


@pytest.mark.parametrize(("num_queries", "num_tokens"), [(24, 24), (1, 24), (5, 24), (1, 1), (2, 25), (300, 700)])
def test_on_cuda_a_chunk_is_one_call_of_flash(num_queries: int, num_tokens: int) -> None:
    torch.manual_seed(num_queries)
    queries = torch.randn(6, num_queries, 8)
    keys, values = torch.randn(2, num_tokens, 2, 8).transpose(1, 2)
    expected = attend(queries, keys, values, 0.3)
    with flash_on_cpu() as shapes:
        # So few scores would be a tile for every query.
        output = attend(queries, keys, values, 0.3, most_scores=1)
    assert shapes == [((1, 6, num_queries, 8), (1, 2, num_tokens, 8))]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (264, 264), (24, 16)])
def test_heads_that_flash_does_not_take_go_tile_by_tile(head_dim: int, value_dim: int) -> None:
    queries, keys, values = torch.randn(4, 3, head_dim), torch.randn(2, 9, head_dim), torch.randn(2, 9, value_dim)
    with flash_on_cpu() as shapes:
        output = attend(queries, keys, values, 0.3, most_scores=1)
    assert not shapes
    torch.testing.assert_close(output, attend(queries, keys, values, 0.3))


@pytest.mark.parametrize("num_queries", [1, 700, 2048])
def test_the_host_never_waits_for_a_copy(num_queries: int) -> None:
    queries = torch.empty(4, num_queries, 16, device="meta")
    keys = torch.empty(2, 3000, 16, device="meta")
    with blocking_copies() as found:
        attend(queries, keys, keys, 0.3)
    assert found == []
