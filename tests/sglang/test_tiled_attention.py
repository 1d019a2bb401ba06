"""Attention in tiles against a softmax written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from spec_stack.sglang.pool_attention import Window, attend
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


@pytest.mark.parametrize(("num_queries", "num_tokens"), [(24, 24), (1, 24), (5, 24), (1, 1), (2, 25), (300, 700)])
@pytest.mark.parametrize("window", [None, Window(500, 300)])
def test_on_cuda_a_chunk_is_one_call_of_flash(num_queries: int, num_tokens: int, window: Window | None) -> None:
    torch.manual_seed(num_queries)
    queries = torch.randn(6, num_queries, 8)
    keys, values = torch.randn(2, num_tokens, 2, 8).transpose(1, 2)
    expected = attend(queries, keys, values, 0.3, window=window)
    with flash_on_cpu() as shapes:
        # So few scores would be a tile for every query.
        output = attend(queries, keys, values, 0.3, most_scores=1, window=window)
    assert shapes == [((1, 6, num_queries, 8), (1, 2, num_tokens, 8))]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (264, 264), (24, 16)])
def test_heads_that_flash_does_not_take_go_tile_by_tile(head_dim: int, value_dim: int) -> None:
    queries, keys, values = torch.randn(4, 3, head_dim), torch.randn(2, 9, head_dim), torch.randn(2, 9, value_dim)
    with flash_on_cpu() as shapes:
        output = attend(queries, keys, values, 0.3, most_scores=1)
    assert not shapes
    torch.testing.assert_close(output, attend(queries, keys, values, 0.3))


@pytest.mark.parametrize("window", [None, Window(512, 4), Window(1024, 64), Window(100, 0)])
@pytest.mark.parametrize("num_queries", [1, 700, 2048])
def test_the_host_never_waits_for_a_copy(window: Window | None, num_queries: int) -> None:
    queries = torch.empty(4, num_queries, 16, device="meta")
    keys = torch.empty(2, 3000, 16, device="meta")
    with blocking_copies() as found:
        attend(queries, keys, keys, 0.3, window=window)
    assert found == []


class Asked(TorchFunctionMode):
    """The shapes of queries and keys that SDPA is asked for, and whether with a mask and grouped heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, torch.Size]] = set()
        self.is_slow = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.shapes.add((args[0].shape, args[1].shape))
            self.is_slow |= kwargs.get("attn_mask") is not None and kwargs.get("enable_gqa", False)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("window", [Window(512, 4), pytest.param(Window(1024, 64), marks=pytest.mark.nightly)])
def test_windows_of_prompts_of_other_lengths_ask_for_the_same_kernels(window: Window) -> None:
    """cuDNN builds a plan for every shape, and no quick kernel of CUDA takes grouped heads with a mask."""
    asked = Asked(), Asked()
    for num_tokens, found in zip((32768, 32805), asked, strict=True):
        ends = [*range(num_tokens - num_tokens // 8192 * 8192, num_tokens + 1, 8192)]
        with found:
            for start, stop in zip([0, *ends], ends, strict=False):
                if stop > start:
                    queries = torch.empty(16, stop - start, 8, device="meta")
                    keys = torch.empty(8, stop, 8, device="meta")
                    attend(queries, keys, keys, 0.3, window=window)
        assert not found.is_slow
    # The two parts of the tiles that a chunk ends in.
    assert len(asked[1].shapes - asked[0].shapes) <= 4
